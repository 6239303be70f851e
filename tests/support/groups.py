"""Cache groups that no served model has yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.codecs.base import Plane, Role


@dataclass(frozen=True, slots=True)
class SlidingGroup:
    """Layers whose tokens read the `window` tokens before them and themselves, and nothing older."""

    layers: tuple[int, ...]
    n_kv_heads: int
    head_dim: int
    window: int
    name: str = "sliding"

    @property
    def values_per_token(self) -> int:
        return 2 * len(self.layers) * self.n_kv_heads * self.head_dim

    @property
    def serves_from_leaves(self) -> bool:
        return False

    def planes(self, page_size: int) -> tuple[Plane, ...]:
        return tuple(Plane(role, page_size, self.n_kv_heads, self.head_dim) for role in Role)

    def servable(self, path: Sequence[bool], page_size: int) -> int:
        for n in range(len(path), 0, -1):
            if all(path[self.first_page_read(n * page_size, page_size) : n]):
                return n
        return 0

    def first_page_read(self, n_tokens: int, page_size: int) -> int:
        return max(n_tokens - self.window, 0) // page_size

    def pages_held(self, n_tokens: int, page_size: int) -> int:
        return n_tokens // page_size - self.first_page_read(n_tokens, page_size)
