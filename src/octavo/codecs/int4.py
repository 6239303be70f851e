"""int4: 4 bits per value, asymmetric: keys per channel over the page's tokens, values per token, rotated.

Groups, scales and minima: `affine`, with 15 levels. Values are always stored after the Hadamard transform
(`rotation.hadamard`), keys where `plane.rotate` says so (not where the model has a key bias, which a per-channel
minimum absorbs and rotation would spread).

Effective bits: keys 4 + 32 / min(page_size, 64), values 4 + 32 / 64 where head_dim is a multiple of 64; at
page_size 32 and head_dim 64, 4.75 over both.

Byte layout, T = ceil(page_size / 64), G = ceil(head_dim / 64):

    keys     codes    uint8    [n_heads, head_dim / 2, page_size]
             scales   float16  [n_heads, T, head_dim]
             minima   float16  [n_heads, T, head_dim]
    values   codes    uint8    [n_heads, page_size / 2, head_dim]
             scales   float16  [n_heads, G, page_size]
             minima   float16  [n_heads, G, page_size]

The codes of two rows in turn (`affine.stored_codes`) are packed in runs of 32, then one of 16 where it is needed to
fill the row: byte j of a run of r codes holds code j in its low four bits and code j + r / 2 in its high four, so that
one mask and one shift give two vectors of consecutive codes. head_dim must be a multiple of 8. The codes of all heads
come first, then all scales, then all minima.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.codecs.affine import codes_of, dequantize, head_bytes, quantize, scale_bytes, stored_codes
from octavo.codecs.base import F32, U8, Plane, Role
from octavo.codecs.layout import check_bytes, check_input, from_stored, require, stored_shape, to_stored
from octavo.codecs.rotation import hadamard
from octavo.errors import ConfigError

LEVELS = 15
#: How many codes are packed together, longest first.
RUNS = (32, 16)


class Int4Codec:
    name = "int4"
    kernel_id = 4

    def bytes_per_page(self, plane: Plane) -> int:
        if plane.head_dim % 8:
            raise ConfigError(f"int4 needs a head_dim that is a multiple of 8, got {plane.head_dim}")
        return plane.n_values // 2 + scale_bytes(plane)

    def rotates(self, plane: Plane) -> bool:
        return plane.role is Role.VALUE or plane.rotate

    def encode(self, x: F32, plane: Plane) -> U8:
        x = check_input(x, plane, self.name)
        if self.rotates(plane):
            x = hadamard(x)
            require(np.isfinite(x), "a value overflows when rotated", plane, self.name, head_axis=1)
        codes, stored = quantize(to_stored(x, plane), LEVELS, plane, self.name)
        return np.concatenate([_pack(stored_codes(codes, LEVELS)).reshape(-1), stored])

    def decode(self, data: U8, plane: Plane, n_tokens: int | None = None) -> F32:
        data = check_bytes(data, self.bytes_per_page(plane), self.name)
        n_heads, rows, length = stored_shape(plane)
        n_codes = plane.n_values // 2
        codes = codes_of(_unpack(data[:n_codes].reshape(n_heads, rows // 2, length)), LEVELS)
        x = from_stored(dequantize(codes, data[n_codes:], plane, self.name, n_tokens), plane)
        return hadamard(x) if self.rotates(plane) else x

    def head_bytes(self, plane: Plane) -> NDArray[np.int64]:
        return head_bytes(plane, plane.n_values // 2)


def _runs(n: int) -> Iterator[slice]:
    """The runs that cover an axis of n codes."""
    start = 0
    for run in RUNS:
        while n - start >= run:
            yield slice(start, start + run)
            start += run


def _pack(codes: U8) -> U8:
    """uint8 codes [..., n] -> bytes [..., n / 2]."""
    packed = np.empty((*codes.shape[:-1], codes.shape[-1] // 2), np.uint8)
    for run in _runs(codes.shape[-1]):
        half = (run.stop - run.start) // 2
        middle = run.start + half
        packed[..., run.start // 2 : run.stop // 2] = codes[..., run.start : middle] | (
            codes[..., middle : run.stop] << np.uint8(4)
        )
    return packed


def _unpack(packed: U8) -> U8:
    """The inverse of `_pack`."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    for run in _runs(codes.shape[-1]):
        both = packed[..., run.start // 2 : run.stop // 2]
        codes[..., run] = np.concatenate((both & np.uint8(15), both >> np.uint8(4)), axis=-1)
    return codes
