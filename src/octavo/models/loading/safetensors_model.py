"""A Hugging Face directory (config.json and safetensors) -> ModelSpec and ModelWeights.

Llama, Mistral, Qwen2 and Qwen3. A field that asks for something Octavo does not compute is refused with its
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import LoadError, UnsupportedError
from octavo.models.loading.dequant import dequantize
from octavo.models.loading.planned import refuse_architecture
from octavo.models.loading.safetensors import StoredTensor, open_tensors, read_json, weight_files
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

#: Class name in config.json -> the family's name.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

#: What transformers' Mistral takes where config.json says nothing.
_MISTRAL_WINDOW = 4096


def read_directory(directory: Path) -> tuple[ModelSpec, ModelWeights]:
    """Raises LoadError for files that are missing, damaged or contradictory, UnsupportedError for what is not
    built.
    """
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise UnsupportedError(f"{directory}: an adapter; Octavo loads whole models: merge it into its base first")
        raise LoadError(f"{directory}: no config.json: not a Hugging Face model directory")
    config = _Config(read_json(directory / "config.json"), str(directory / "config.json"))
    spec = config.spec()
    tensors = open_tensors(weight_files(directory))
    return spec, _Weights(str(directory), config, spec, tensors).read()


def read_config(directory: Path) -> ModelSpec:
    """The spec alone, without opening the weights."""
    return _Config(read_json(directory / "config.json"), str(directory / "config.json")).spec()


def read_eos_ids(directory: Path) -> frozenset[int]:
    """Ids that end a text: those of generation_config.json, else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            value = read_json(directory / name).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            ids = frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))
            if ids:
                return ids
    return frozenset()


class _Config:
    """config.json, with the defaults of the model's class in transformers."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        name = self._class_name()
        if name not in ARCHITECTURES:
            raise refuse_architecture(where, name, ARCHITECTURES)
        self.architecture = ARCHITECTURES[name]
        self.tied = values.get("tie_word_embeddings", False) is True
        #: Qwen2 always has them; elsewhere attention_bias says so, for the output too (which is not
        #: supported).
        self.qkv_bias = self.architecture == "qwen2" or values.get("attention_bias", False) is True

    def _class_name(self) -> str:
        names = self.values.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        model_type = self.values.get("model_type")
        if not isinstance(model_type, str):
            raise LoadError(f"{self.where}: neither architectures nor model_type: not a model's config")
        return next((name for name, family in ARCHITECTURES.items() if family == model_type), model_type)

    def refuse(self, field: str, value: object, why: str) -> UnsupportedError:
        return UnsupportedError(f"{self.where}: {field} = {value!r} is not supported: {why}")

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LoadError(f"{self.where}: {field} must be a whole number of at least 1, is {value!r}")
        return value

    def number(self, values: Mapping[str, Any], field: str, default: float | None = None) -> float:
        value = values.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value) or value <= 0:
            raise LoadError(f"{self.where}: {field} must be a positive number, is {value!r}")
        return float(value)

    def optional(self, values: Mapping[str, Any], field: str) -> float | None:
        return None if values.get(field) is None else self.number(values, field)

    def spec(self) -> ModelSpec:
        d_model, n_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        # Absent means as many as heads for Llama, null for all; other classes always write it.
        same = self.architecture == "llama" or "num_key_value_heads" in self.values
        n_kv_heads = self.integer("num_key_value_heads", n_heads if same else None)
        if n_heads % n_kv_heads != 0:
            raise LoadError(f"{self.where}: {n_heads} query heads do not divide into {n_kv_heads} KV heads")
        head_dim = self.integer("head_dim", 128 if self.architecture == "qwen3" else d_model // n_heads)
        if head_dim % 2 != 0:
            raise LoadError(f"{self.where}: rotary embedding needs an even head_dim, is {head_dim}")
        context = self.integer("max_position_embeddings")
        self.check_supported(context)
        return ModelSpec(
            architecture=self.architecture,
            vocab_size=self.integer("vocab_size"),
            d_model=d_model,
            n_layers=self.integer("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            d_ff=self.integer("intermediate_size"),
            norm_eps=self.number(self.values, "rms_norm_eps", 1e-6),
            context_length=context,
            rope=self.rope(head_dim, context),
            qkv_bias=self.qkv_bias,
            qk_norm=self.architecture == "qwen3",
        )

    def check_supported(self, context: int) -> None:
        get = self.values.get
        if get("hidden_act", "silu") not in ("silu", "swish"):
            raise self.refuse("hidden_act", get("hidden_act"), "only silu is")
        if get("mlp_bias", False):
            raise self.refuse("mlp_bias", True, "linear layers of the MLP have no bias")
        if get("quantization_config") is not None:
            method = get("quantization_config")
            method = method.get("quant_method", method) if isinstance(method, dict) else method
            raise self.refuse("quantization_config", method, "use the unquantized checkpoint or a GGUF")
        window = self.window()
        if window is not None and window < context:
            raise self.refuse("sliding_window", window, "sliding-window attention is planned, not built yet")

    def window(self) -> int | None:
        """The sliding window that some layer uses, or None."""
        get = self.values.get
        window = get("sliding_window", _MISTRAL_WINDOW if self.architecture == "mistral" else None)
        types = get("layer_types")
        if types is not None:
            others = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
            if others:
                raise self.refuse("layer_types", others, "only full attention is")
            uses = "sliding_attention" in types
        elif self.architecture == "mistral":
            uses = True
        else:
            uses = bool(get("use_sliding_window", False)) and self.integer("max_window_layers", 28) < self.integer(
                "num_hidden_layers"
            )
        return self.integer("sliding_window", window) if uses and window is not None else None

    # Rotary embedding

    def rope(self, head_dim: int, context: int) -> RopeSpec:
        """transformers 5 writes rope_parameters (with rope_theta in it), earlier versions rope_scaling beside
        it.
        """
        field = "rope_parameters" if self.values.get("rope_parameters") is not None else "rope_scaling"
        values = self.values.get(field)
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise LoadError(f"{self.where}: {field} must be an object, is {values!r}")
        if any(isinstance(v, dict) for v in values.values()):
            raise self.refuse(field, sorted(values), "one rotary embedding for all layers is")
        partial = values.get("partial_rotary_factor", self.values.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise self.refuse("partial_rotary_factor", partial, "only 1 is")
        theta = values.get("rope_theta", self.values.get("rope_theta"))
        theta = self.number({"rope_theta": theta}, "rope_theta", 10000.0)
        kind = values.get("rope_type", values.get("type", "default"))
        return RopeSpec(theta, head_dim, self.rope_scaling(str(kind), values, field, context))

    def rope_scaling(self, kind: str, values: Mapping[str, Any], field: str, context: int) -> RopeScaling | None:
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling("linear", factor=self.number(values, "factor"))
        if kind not in ("llama3", "yarn"):
            raise self.refuse(f"{field}.rope_type", kind, "default, linear, llama3 and yarn are")
        trained = self.values.get("original_max_position_embeddings")
        trained = values.get("original_max_position_embeddings") if trained is None else trained
        trained = context if trained is None else trained
        if not isinstance(trained, int) or isinstance(trained, bool) or trained < 1:
            raise LoadError(f"{self.where}: original_max_position_embeddings must be a whole number, is {trained!r}")
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                factor=self.number(values, "factor"),
                original_context=trained,
                low_freq_factor=self.number(values, "low_freq_factor"),
                high_freq_factor=self.number(values, "high_freq_factor"),
            )
        return RopeScaling(
            "yarn",
            factor=self.number(values, "factor", context / trained),
            original_context=trained,
            beta_fast=self.number(values, "beta_fast", 32.0),
            beta_slow=self.number(values, "beta_slow", 1.0),
            truncate=bool(values.get("truncate", True)),
            attention_factor=self.optional(values, "attention_factor"),
            mscale=self.optional(values, "mscale"),
            mscale_all_dim=self.optional(values, "mscale_all_dim"),
        )


class _Weights:
    def __init__(self, where: str, config: _Config, spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> None:
        self.where, self.config, self.spec, self.tensors = where, config, spec, tensors
        # Older checkpoints carry the frequencies, which follow from the config.
        self.unread = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        found = self.tensors.get(name)
        if found is None:
            raise LoadError(f"{self.where}: no tensor {name} in its weights")
        if found.shape != shape:
            raise LoadError(f"{self.where}: tensor {name} has shape {found.shape}, config.json asks for {shape}")
        self.unread.discard(name)
        return found

    def matrix(self, name: str, rows: int, cols: int) -> Tensor:
        found = self.stored(name, (rows, cols))
        return Tensor(name, found.dtype, rows, cols, found.data)

    def vector(self, name: str, size: int) -> F32:
        found = self.stored(name, (size,))
        return dequantize(Tensor(name, found.dtype, 1, size, found.data)).reshape(size)

    def read(self) -> ModelWeights:
        spec = self.spec
        embedding = self.matrix("model.embed_tokens.weight", spec.vocab_size, spec.d_model)
        layers = tuple(self.layer(i) for i in range(spec.n_layers))
        final_norm = self.vector("model.norm.weight", spec.d_model)
        head = self.head(embedding)
        if self.unread:
            names = sorted(self.unread)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UnsupportedError(
                f"{self.where}: tensors that {spec.architecture} models do not have in Octavo: "
                f"{', '.join(names[:3])}{more}"
            )
        return ModelWeights(embedding, layers, final_norm, head)

    def head(self, embedding: Tensor) -> Tensor:
        name = "lm_head.weight"
        if not self.config.tied:
            return self.matrix(name, embedding.rows, embedding.cols)
        if name in self.tensors:
            head = self.matrix(name, embedding.rows, embedding.cols)
            if head.dtype != embedding.dtype or not np.array_equal(head.data, embedding.data):
                raise LoadError(f"{self.where}: tie_word_embeddings is true but {name} is not the embedding")
        return embedding

    def layer(self, i: int) -> LayerWeights:
        spec = self.spec
        q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        p = f"model.layers.{i}."
        a, m = p + "self_attn.", p + "mlp."
        if a + "o_proj.bias" in self.tensors:
            raise self.config.refuse("attention_bias", True, f"the output projection has a bias ({a}o_proj.bias)")
        bias = spec.qkv_bias
        attention = AttentionWeights(
            norm=self.vector(p + "input_layernorm.weight", spec.d_model),
            q=self.matrix(a + "q_proj.weight", q_rows, spec.d_model),
            k=self.matrix(a + "k_proj.weight", kv_rows, spec.d_model),
            v=self.matrix(a + "v_proj.weight", kv_rows, spec.d_model),
            o=self.matrix(a + "o_proj.weight", spec.d_model, q_rows),
            q_bias=self.vector(a + "q_proj.bias", q_rows) if bias else None,
            k_bias=self.vector(a + "k_proj.bias", kv_rows) if bias else None,
            v_bias=self.vector(a + "v_proj.bias", kv_rows) if bias else None,
            q_norm=self.vector(a + "q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self.vector(a + "k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        )
        mlp = MlpWeights(
            norm=self.vector(p + "post_attention_layernorm.weight", spec.d_model),
            gate=self.matrix(m + "gate_proj.weight", spec.d_ff, spec.d_model),
            up=self.matrix(m + "up_proj.weight", spec.d_ff, spec.d_model),
            down=self.matrix(m + "down_proj.weight", spec.d_model, spec.d_ff),
        )
        return LayerWeights(attention, mlp)
