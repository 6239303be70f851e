"""What a model needs cached, as plain numbers. Built from a model's config; read by formats, footprint and planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.codecs.base import Plane, Role


class CacheGroup(Protocol):
    """Layers that cache the same planes and forget by the same rule. Their pages and tables are their own.

    Frozen and compared by value. Page i of a sequence holds its positions from i * page_size on.
    """

    @property
    def name(self) -> str:
        """Names the group within its model."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers that belong to it, rising."""
        ...

    @property
    def values_per_token(self) -> int:
        """Numbers that one token needs cached, over all the group's layers."""
        ...

    @property
    def serves_from_leaves(self) -> bool:
        """Whether a missing page makes every page behind it useless, so that only a path's last page may go."""
        ...

    def planes(self, page_size: int) -> tuple[Plane, ...]:
        """The planes of one layer in one page, in the order of their bytes."""
        ...

    def servable(self, path: Sequence[bool], page_size: int) -> int:
        """`path[i]`: whether page i of a prefix can be had. Returns the most pages that the group can serve as a hit:
        everything that a token behind them reads is there."""
        ...

    def first_page_read(self, n_tokens: int, page_size: int) -> int:
        """The first page that any token from position n_tokens on reads; earlier ones may be given back."""
        ...

    def pages_held(self, n_tokens: int, page_size: int) -> int:
        """Full pages that a sequence of n_tokens holds."""
        ...


@dataclass(frozen=True, slots=True)
class FullGroup:
    """Layers whose every token stays readable (MHA, GQA, MQA): 2 x n_kv_heads x head_dim values per token and layer.

    `key_bias` says that keys carry a per-channel bias (Qwen2): such keys are not rotated before quantization, since
    rotation would spread the bias over all channels.
    """

    layers: tuple[int, ...]
    n_kv_heads: int
    head_dim: int
    key_bias: bool = False
    name: str = "full"

    @property
    def values_per_token(self) -> int:
        return 2 * len(self.layers) * self.n_kv_heads * self.head_dim

    @property
    def serves_from_leaves(self) -> bool:
        return True

    def planes(self, page_size: int) -> tuple[Plane, ...]:
        return (
            Plane(Role.KEY, page_size, self.n_kv_heads, self.head_dim, rotate=not self.key_bias),
            Plane(Role.VALUE, page_size, self.n_kv_heads, self.head_dim, rotate=True),
        )

    def servable(self, path: Sequence[bool], page_size: int) -> int:
        return next((i for i, there in enumerate(path) if not there), len(path))

    def first_page_read(self, n_tokens: int, page_size: int) -> int:
        return 0

    def pages_held(self, n_tokens: int, page_size: int) -> int:
        return n_tokens // page_size


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache groups of a model. Each of its layers that caches anything is in one of them."""

    groups: tuple[CacheGroup, ...]

    def group_of(self, layer: int) -> tuple[int, int]:
        """-> (index of the layer's group, the layer's index within the group). Raises ValueError if none."""
        for i, group in enumerate(self.groups):
            if layer in group.layers:
                return i, group.layers.index(layer)
        raise ValueError(f"layer {layer} is in no cache group")

    @property
    def values_per_token(self) -> int:
        return sum(group.values_per_token for group in self.groups)
