"""What a model needs cached, as plain numbers. Built from a model's config; read by formats, footprint and planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullGroup:
    """Layers whose every token stays readable (MHA, GQA, MQA): 2 x n_kv_heads x head_dim values per token and layer.

    `key_bias` says that keys carry a per-channel bias (Qwen2): such keys are not rotated before quantization, since
    rotation would spread the bias over all channels.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    key_bias: bool = False

    @property
    def values_per_token(self) -> int:
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache groups of a model. One kind exists today; sliding, latent and state groups will join."""

    group: FullGroup
