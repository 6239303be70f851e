"""Codecs that store values as computed, or rounded once: f32, f16, bf16.

Byte layout, all three: one array of little-endian values, keys [n_heads, head_dim, page_size], values
[n_heads, page_size, head_dim]; no scales, no padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.codecs.base import F32, U8, Plane
from octavo.codecs.layout import (
    as_float16,
    check_bytes,
    check_input,
    from_stored,
    require,
    split_heads,
    stored_shape,
    to_stored,
)


class ExactCodec(ABC):
    """One stored number per value, never rotated."""

    name: str
    kernel_id: int
    value_bytes: int

    def bytes_per_page(self, plane: Plane) -> int:
        return plane.n_values * self.value_bytes

    def rotates(self, plane: Plane) -> bool:
        return False

    def encode(self, x: F32, plane: Plane) -> U8:
        y = self.narrow(to_stored(check_input(x, plane, self.name), plane), plane)
        return y.reshape(-1).view(np.uint8)

    def decode(self, data: U8, plane: Plane, n_tokens: int | None = None) -> F32:
        y = self.widen(check_bytes(data, self.bytes_per_page(plane), self.name))
        return from_stored(y.reshape(stored_shape(plane)), plane)[:n_tokens]

    def head_bytes(self, plane: Plane) -> NDArray[np.int64]:
        return split_heads(plane.n_heads, [self.bytes_per_page(plane)])

    @abstractmethod
    def narrow(self, x: F32, plane: Plane) -> NDArray[Any]:
        """float32 -> the stored type, same shape. Raises CodecRangeError on overflow."""

    @abstractmethod
    def widen(self, data: U8) -> F32:
        """Bytes -> float32, flat."""


class F32Codec(ExactCodec):
    """float32, bit for bit. Also the form of open pages."""

    name = "f32"
    kernel_id = 0
    value_bytes = 4

    def narrow(self, x: F32, plane: Plane) -> NDArray[Any]:
        return x

    def widen(self, data: U8) -> F32:
        return data.view(np.float32).copy()


class F16Codec(ExactCodec):
    """float16, rounded to nearest even. A value that rounds beyond 65504 raises CodecRangeError."""

    name = "f16"
    kernel_id = 1
    value_bytes = 2

    def narrow(self, x: F32, plane: Plane) -> NDArray[Any]:
        y = as_float16(x)
        require(np.isfinite(y), "a value is beyond the range of float16 (65504)", plane, self.name)
        return y

    def widen(self, data: U8) -> F32:
        return data.view(np.float16).astype(np.float32)


class BF16Codec(ExactCodec):
    """bfloat16, the upper half of a float32, rounded to nearest even."""

    name = "bf16"
    kernel_id = 2
    value_bytes = 2

    def narrow(self, x: F32, plane: Plane) -> NDArray[Any]:
        bits = x.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        y = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
        finite = (y & np.uint16(0x7F80)) != np.uint16(0x7F80)
        require(finite, "a value is beyond the range of bfloat16 (3.39e38)", plane, self.name)
        return y

    def widen(self, data: U8) -> F32:
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
