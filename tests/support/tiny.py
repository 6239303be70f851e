"""Tiny random models, built in memory, and an engine around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.cache.footprint import plan
from octavo.cache.format import Form
from octavo.config import EngineConfig
from octavo.engine.build import assemble_engine
from octavo.engine.engine import Engine
from octavo.models.loading.load import LoadedModel
from octavo.models.spec import (
    AttentionWeights,
    LayerWeights,
    MlpWeights,
    ModelSpec,
    ModelWeights,
    RopeSpec,
    Tensor,
)

VOCAB = 260


class ByteTokenizer:
    """Token i is byte i; four control tokens follow. The end-of-sequence token is 257."""

    vocab_size = VOCAB
    eos_token_ids = frozenset({257})
    bos_token_id: int | None = None
    has_chat_template = False

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="ignore")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        raise AssertionError("this tokenizer has no chat template")


def tiny_spec(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "architecture": "llama", "vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2,
        "head_dim": 16, "d_ff": 96, "norm_eps": 1e-5, "context_length": 1024, "rope": RopeSpec(1e4, 16),
    }  # fmt: skip
    return ModelSpec(**{**values, **changes})


def tiny_weights(spec: ModelSpec, seed: int = 0) -> ModelWeights:
    rng = np.random.default_rng(seed)

    def matrix(name: str, rows: int, cols: int, scale: float = 1.0) -> Tensor:
        values = (rng.standard_normal((rows, cols)) * scale / np.sqrt(cols)).astype(np.float32)
        return Tensor(name, "F32", rows, cols, values.reshape(-1).view(np.uint8))

    def vector(n: int, scale: float = 0.1, mean: float = 1.0) -> np.ndarray:
        return (mean + rng.standard_normal(n) * scale).astype(np.float32)

    q_dim, kv_dim = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    layers = []
    for i in range(spec.n_layers):
        bias = spec.qkv_bias
        attention = AttentionWeights(
            norm=vector(spec.d_model),
            q=matrix(f"{i}.q", q_dim, spec.d_model, 2.0),
            k=matrix(f"{i}.k", kv_dim, spec.d_model, 2.0),
            v=matrix(f"{i}.v", kv_dim, spec.d_model),
            o=matrix(f"{i}.o", spec.d_model, q_dim),
            q_bias=vector(q_dim, 1.0, 0.0) if bias else None,
            k_bias=vector(kv_dim, 10.0, 0.0) if bias else None,
            v_bias=vector(kv_dim, 1.0, 0.0) if bias else None,
            q_norm=vector(spec.head_dim) if spec.qk_norm else None,
            k_norm=vector(spec.head_dim) if spec.qk_norm else None,
        )
        mlp = MlpWeights(
            norm=vector(spec.d_model),
            gate=matrix(f"{i}.gate", spec.d_ff, spec.d_model),
            up=matrix(f"{i}.up", spec.d_ff, spec.d_model),
            down=matrix(f"{i}.down", spec.d_model, spec.d_ff),
        )
        layers.append(LayerWeights(attention, mlp))
    embedding = matrix("embedding", spec.vocab_size, spec.d_model, np.sqrt(spec.d_model))
    head = matrix("head", spec.vocab_size, spec.d_model, 3.0)
    return ModelWeights(embedding, tuple(layers), vector(spec.d_model), head)


def tiny_engine(
    config: EngineConfig,
    *,
    spec: ModelSpec | None = None,
    seed: int = 0,
    n_frames: int = 0,
    weights: ModelWeights | None = None,
) -> Engine:
    """An engine over a tiny model. `n_frames` sets the arena's size exactly."""
    spec = spec or tiny_spec()
    if n_frames:
        policy = config.policy
        sizes = plan(spec.cache_spec(), config.page_size, [Form(policy.key_codec, policy.value_codec)], 1 << 26)
        config = replace(config, kv_memory_bytes=n_frames * sizes.frame_bytes)
    elif not config.kv_memory_bytes:
        config = replace(config, kv_memory_bytes=1 << 26)
    weights = weights or tiny_weights(spec, seed)
    model = LoadedModel(spec, weights, ByteTokenizer(), name="tiny", path=Path("tiny"), weights_sha256=str(seed))
    return assemble_engine(model, config)
