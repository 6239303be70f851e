"""GGUF metadata and tensors -> ModelSpec and ModelWeights, for the llama, qwen2 and qwen3 families.

What the file asks for and Octavo does not compute is refused, never ignored: an unknown tensor, an active
sliding window, a logit scale. "llama" covers Llama, Mistral and SmolLM2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError, UnsupportedError
from octavo.models.loading.dequant import dequantize
from octavo.models.loading.gguf import GgufFile, StringArray
from octavo.models.loading.planned import refuse_architecture
from octavo.models.spec import (
    F32,
    AttentionWeights,
    LayerWeights,
    MlpWeights,
    ModelSpec,
    ModelWeights,
    RopeScaling,
    RopeSpec,
    Tensor,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3")

#: Metadata that changes the computation; refused when present with another value than the one that means
#: "off".
_MUST_BE_OFF: dict[str, float] = {
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.output_scale": 1.0,
    "attention.temperature_scale": 0.0,
    "attention.temperature_length": 0.0,
    "attention.shared_kv_layers": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.alpha": 0.0,
    "nextn_predict_layers": 0.0,
}


def read_model(file: GgufFile) -> tuple[ModelSpec, ModelWeights]:
    """Raises LoadError for a file that contradicts itself, UnsupportedError for what Octavo lacks."""
    return _ModelReader(file).read()


class _ModelReader:
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.where = str(file.path)
        self.architecture = self._architecture()
        self.unread = set(file.tensors)

    def _architecture(self) -> str:
        metadata = self.file.metadata
        kind = metadata.get("general.type", "model")
        if not isinstance(kind, str) or kind != "model":
            raise UnsupportedError(f"{self.where}: a GGUF of type {kind!r} (general.type); Octavo loads whole models")
        parts = metadata.get("split.count", 1)
        if not isinstance(parts, int) or parts > 1:
            raise UnsupportedError(
                f"{self.where}: part {metadata.get('split.no', 0) + 1} of {parts}; Octavo reads a GGUF in "
                f"one file: join the parts first (llama-gguf-split --merge)"
            )
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise LoadError(f"{self.where}: no general.architecture in the metadata: not a language model")
        if architecture not in ARCHITECTURES:
            raise refuse_architecture(self.where, architecture, ARCHITECTURES)
        return architecture

    # Metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        value = self.get(key, default)
        full = f"{self.architecture}.{key}"
        if value is None:
            raise LoadError(f"{self.where}: no {full} in the metadata")
        if isinstance(value, np.ndarray):
            values = {int(v) for v in value}
            if len(values) != 1:
                raise UnsupportedError(f"{self.where}: {full} differs between layers ({sorted(values)}); not supported")
            value = values.pop()
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise LoadError(f"{self.where}: {full} must be a whole number of at least {low}, is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise LoadError(f"{self.where}: {self.architecture}.{key} must be a number, is {value!r}")
        return float(value)

    def check_off(self, context: int, head_dim: int) -> None:
        for key, off in _MUST_BE_OFF.items():
            value = self.number(key, off)
            if value not in (off, 0.0):
                raise UnsupportedError(
                    f"{self.where}: {self.architecture}.{key} = {value:g} is not supported (only {off:g})"
                )
        if experts := self.integer("expert_count", 0, low=0):
            raise UnsupportedError(
                f"{self.where}: {experts} experts per layer; mixture-of-experts layers are planned, not built yet"
            )
        window = self.integer("attention.sliding_window", 0, low=0)
        if 0 < window < context:
            raise UnsupportedError(
                f"{self.where}: a sliding window of {window} tokens in a context of {context}; "
                f"sliding-window attention is planned, not built yet"
            )
        if self.get("attention.causal", True) is False:
            raise UnsupportedError(f"{self.where}: attention that is not causal: encoders are not supported")
        scale = self.number("attention.scale", head_dim**-0.5)
        if abs(scale * head_dim**0.5 - 1) > 1e-4:
            raise UnsupportedError(f"{self.where}: attention.scale = {scale:g}; only 1/sqrt(head_dim) is supported")

    # Tensors

    def tensor(self, name: str, rows: int, cols: int, row_order: NDArray[np.int32] | None = None) -> Tensor:
        found = self.file.tensors.get(name)
        if found is None:
            raise LoadError(f"{self.where}: no tensor {name}")
        shape = (cols,) if rows == 1 and len(found.shape) == 1 else (cols, rows)
        if found.shape != shape:
            raise LoadError(f"{self.where}: tensor {name} has shape {found.shape}, the metadata asks for {shape}")
        self.unread.discard(name)
        return Tensor(name, found.dtype, rows, cols, self.file.tensor_bytes(name), row_order)

    def vector(self, name: str, size: int) -> F32:
        return dequantize(self.tensor(name, 1, size)).reshape(size)

    def optional_vector(self, name: str, size: int) -> F32 | None:
        return self.vector(name, size) if name in self.file.tensors else None

    # The model

    def read(self) -> tuple[ModelSpec, ModelWeights]:
        d_model, n_layers = self.integer("embedding_length"), self.integer("block_count")
        n_heads = self.integer("attention.head_count")
        n_kv_heads = self.integer("attention.head_count_kv", n_heads)
        if n_heads % n_kv_heads != 0:
            raise LoadError(f"{self.where}: {n_heads} query heads do not divide into {n_kv_heads} KV heads")
        if self.get("attention.key_length") is None and d_model % n_heads != 0:
            raise LoadError(f"{self.where}: embedding_length {d_model} is not a multiple of {n_heads} heads")
        head_dim = self.integer("attention.key_length", d_model // n_heads)
        if head_dim % 2 != 0:
            raise LoadError(f"{self.where}: rotary embedding needs an even head size, is {head_dim}")
        value_dim = self.integer("attention.value_length", head_dim)
        if value_dim != head_dim:
            raise UnsupportedError(
                f"{self.where}: keys of {head_dim} and values of {value_dim} per head; only equal sizes are supported"
            )
        context = self.integer("context_length")
        self.check_off(context, head_dim)
        rope = self.rope(head_dim, context)

        embedding = self.tensor("token_embd.weight", self.vocab_size(), d_model)
        shape = _Shape(d_model, self.integer("feed_forward_length"), n_heads, n_kv_heads, head_dim)
        layers = tuple(self.layer(i, shape) for i in range(n_layers))
        final_norm = self.vector("output_norm.weight", d_model)
        tied = "output.weight" not in self.file.tensors
        head = embedding if tied else self.tensor("output.weight", embedding.rows, d_model)
        if self.unread:
            names = sorted(self.unread)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UnsupportedError(
                f"{self.where}: tensors that {self.architecture} models do not have in Octavo: "
                f"{', '.join(names[:3])}{more}"
            )
        has_bias = {layer.attention.q_bias is not None for layer in layers}
        has_norm = {layer.attention.q_norm is not None for layer in layers}
        if len(has_bias) > 1 or len(has_norm) > 1:
            raise LoadError(f"{self.where}: only some layers have attention biases or query and key norms")
        spec = ModelSpec(
            architecture=self.architecture,
            vocab_size=embedding.rows,
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            d_ff=shape.d_ff,
            norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            context_length=context,
            rope=rope,
            qkv_bias=True in has_bias,
            qk_norm=True in has_norm,
        )
        return spec, ModelWeights(embedding, layers, final_norm, head)

    def vocab_size(self) -> int:
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, StringArray):
            raise LoadError(f"{self.where}: no vocabulary (tokenizer.ggml.tokens) in the metadata")
        return len(tokens)

    def layer(self, i: int, shape: _Shape) -> LayerWeights:
        q_rows, kv_rows = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        q_order = k_order = None
        if self.architecture == "llama":
            q_order = half_split_order(shape.n_heads, shape.head_dim)
            k_order = half_split_order(shape.n_kv_heads, shape.head_dim)
        p = f"blk.{i}."
        biases = [
            self.optional_vector(f"{p}attn_{part}.bias", rows)
            for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        ]
        if any(b is None for b in biases) and any(b is not None for b in biases):
            raise UnsupportedError(
                f"{self.where}: layer {i} has a bias on some of q, k and v; all or none are supported"
            )
        q_bias, k_bias, v_bias = biases
        if q_bias is not None and k_bias is not None and q_order is not None and k_order is not None:
            q_bias, k_bias = q_bias[q_order], k_bias[k_order]
        q_norm = k_norm = None
        if self.architecture == "qwen3":
            q_norm = self.vector(p + "attn_q_norm.weight", shape.head_dim)
            k_norm = self.vector(p + "attn_k_norm.weight", shape.head_dim)
        attention = AttentionWeights(
            norm=self.vector(p + "attn_norm.weight", shape.d_model),
            q=self.tensor(p + "attn_q.weight", q_rows, shape.d_model, q_order),
            k=self.tensor(p + "attn_k.weight", kv_rows, shape.d_model, k_order),
            v=self.tensor(p + "attn_v.weight", kv_rows, shape.d_model),
            o=self.tensor(p + "attn_output.weight", shape.d_model, q_rows),
            q_bias=q_bias,
            k_bias=k_bias,
            v_bias=v_bias,
            q_norm=q_norm,
            k_norm=k_norm,
        )
        mlp = MlpWeights(
            norm=self.vector(p + "ffn_norm.weight", shape.d_model),
            gate=self.tensor(p + "ffn_gate.weight", shape.d_ff, shape.d_model),
            up=self.tensor(p + "ffn_up.weight", shape.d_ff, shape.d_model),
            down=self.tensor(p + "ffn_down.weight", shape.d_model, shape.d_ff),
        )
        return LayerWeights(attention, mlp)

    def rope(self, head_dim: int, context: int) -> RopeSpec:
        dim = self.integer("rope.dimension_count", head_dim)
        if dim != head_dim:
            raise UnsupportedError(
                f"{self.where}: rotary embedding over {dim} of {head_dim} channels; only all channels are supported"
            )
        return RopeSpec(self.number("rope.freq_base", 10000.0), dim, self.rope_scaling(dim, context))

    def rope_scaling(self, dim: int, context: int) -> RopeScaling | None:
        kind = self.get("rope.scaling.type", "none")
        if not isinstance(kind, str):
            raise LoadError(f"{self.where}: rope.scaling.type must be a word, is {kind!r}")
        factor = self.number("rope.scaling.factor", 1.0)
        if kind == "none" and self.get("rope.scale_linear") is not None:  # files from before rope.scaling existed
            kind, factor = "linear", self.number("rope.scale_linear")
        explicit = "rope_freqs.weight" in self.file.tensors
        extra = self.number("rope.scaling.yarn_attn_factor", self.number("rope.scaling.attn_factor", 1.0))
        if kind != "yarn" and extra != 1.0:
            raise UnsupportedError(f"{self.where}: rope.scaling.attn_factor = {extra:g} without YaRN")
        if kind not in ("none", "linear", "yarn"):
            raise UnsupportedError(
                f"{self.where}: rope.scaling.type {kind!r}; supported: none, linear, yarn, rope_freqs"
            )
        if kind != "none" and factor <= 0:
            raise LoadError(f"{self.where}: rope.scaling.factor must be positive, is {factor:g}")
        if explicit:
            if kind != "none" and factor != 1.0:
                raise UnsupportedError(f"{self.where}: rope_freqs.weight together with {kind} rope scaling")
            divisors = self.vector("rope_freqs.weight", dim // 2)
            if not np.all(np.isfinite(divisors) & (divisors > 0)):
                raise LoadError(f"{self.where}: rope_freqs.weight holds values that are not positive")
            return RopeScaling("explicit", divisors=tuple(float(d) for d in divisors))
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return RopeScaling("linear", factor=factor)
        if self.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
            raise UnsupportedError(f"{self.where}: rope.scaling.yarn_ext_factor other than 1 is not supported")
        # The file's factor multiplies YaRN's own; ours replaces it.
        return RopeScaling(
            "yarn",
            factor=factor,
            original_context=self.integer("rope.scaling.original_context_length", context),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=None if extra == 1.0 else extra * (0.1 * log(factor) + 1.0),
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Dimensions that all layers share."""

    d_model: int
    d_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int


def half_split_order(n_heads: int, head_dim: int) -> NDArray[np.int32]:
    """int32 [n_heads * head_dim]: where the half-split convention's rows lie in a file that pairs neighbours.

    GGUF's "llama" stores channel i of the first half at 2 i and its partner in the second half at 2 i + 1.
    """
    stored = np.arange(n_heads * head_dim, dtype=np.int32).reshape(n_heads, head_dim // 2, 2)
    return np.ascontiguousarray(stored.transpose(0, 2, 1)).reshape(-1)
