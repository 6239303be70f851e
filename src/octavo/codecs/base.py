"""The contract of a codec: how the values of one layer's keys or values in one sealed page become bytes.

A codec never sees a model or a page; it sees a `Plane`. The numpy code in this package is the definition: the C++
kernels (csrc/codecs) write the same bytes and are tested against it byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class Role(StrEnum):
    """What a plane holds. Keys are stored channel-major, values token-major (see each codec's layout)."""

    KEY = "key"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's keys or values in one page.

    `rotate` stores every head's vector after an orthonormal Hadamard transform over head_dim
    (`rotation.hadamard`), which spreads outlier channels. Codecs that do not rotate ignore it. `first_head` is the
    number of the first head, for messages.
    """

    role: Role
    page_size: int
    n_heads: int
    head_dim: int
    rotate: bool = False
    first_head: int = 0

    @property
    def n_values(self) -> int:
        return self.page_size * self.n_heads * self.head_dim

    def head(self, head: int) -> Plane:
        """The plane of one head alone."""
        return replace(self, n_heads=1, first_head=self.first_head + head)


class Codec(Protocol):
    """Encodes one full plane. Stateless; one instance serves all layers.

    Rules:
    - `encode` is a pure function of its input: the same values give the same bytes, on every path.
    - `decode(encode(x))` is in the original (unrotated) basis.
    - A NaN or infinite value, or a scale outside its format, raises `CodecRangeError`; nothing is clamped silently.
    - `bytes_per_page` is exact: the arena allocates by it. Layouts leave no unwritten byte.
    - A head's bytes do not depend on the other heads, and no byte is of two heads.
    """

    name: str
    kernel_id: int

    def bytes_per_page(self, plane: Plane) -> int:
        """Bytes of one encoded plane."""
        ...

    def rotates(self, plane: Plane) -> bool:
        """Whether the stored values are in the rotated basis."""
        ...

    def encode(self, x: F32, plane: Plane) -> U8:
        """x: float32 [page_size, n_heads, head_dim] -> uint8 [bytes_per_page]."""
        ...

    def decode(self, data: U8, plane: Plane, n_tokens: int | None = None) -> F32:
        """data: uint8 [bytes_per_page] -> float32 [page_size, n_heads, head_dim].

        n_tokens: only that many tokens, the first, are there, and given: float32 [n_tokens, n_heads, head_dim]. What is
        stored for the others is arbitrary.
        """
        ...

    def head_bytes(self, plane: Plane) -> NDArray[np.int64]:
        """int64 [n_heads, bytes_per_page / n_heads]: where the bytes of `plane.head(i)` lie, in their order there."""
        ...
