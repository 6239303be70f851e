"""int4: 4 bits per value, asymmetric, with a float16 scale and a float16 minimum per group.

Keys are grouped per channel over consecutive tokens of the page (KIVI, arXiv 2402.02750): a group is up to
GROUP = 64 tokens of one channel, so one group per page up to 64 tokens and two at 128. Values are grouped per
token: up to GROUP channels of one head. Values are always stored after the Hadamard transform
(`rotation.hadamard`), keys where `plane.rotate` says so (not where the model has a key bias, which a
per-channel minimum absorbs and rotation would spread).

minimum = min(x) rounded down to float16; scale = (max(x) - minimum) / 15 rounded up to float16, so that 15
steps from the stored minimum reach the maximum; code = round_half_even((x - minimum) / scale) in [0, 15],
taken against both as stored; value = code * scale + minimum. A group whose values all equal the stored
minimum takes MIN_SCALE.

Effective bits: keys 4 + 32 / min(page_size, 64), values 4 + 32 / 64 where head_dim is a multiple of 64; at
page_size 32 and head_dim 64, 4.75 over both.

Byte layout, T = ceil(page_size / GROUP), G = ceil(head_dim / GROUP):

    keys     codes    uint8    [n_heads, head_dim, page_size / 2]
             scales   float16  [n_heads, T, head_dim]
             minima   float16  [n_heads, T, head_dim]
    values   codes    uint8    [n_heads, page_size, head_dim / 2]
             scales   float16  [n_heads, page_size, G]
             minima   float16  [n_heads, page_size, G]

Codes are packed in runs along the last axis: runs of 32, then one of 16 and one of 8 where they are needed to
fill it. Byte j of a run of r codes holds code j in its low four bits and code j + r / 2 in its high four, so
that one mask and one shift give two vectors of consecutive codes. head_dim must be a multiple of 8. The codes
of all heads come first, then all scales, then all minima.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.codecs.base import F32, U8, Plane, Role
from octavo.codecs.layout import (
    F16,
    MIN_SCALE,
    check_bytes,
    check_input,
    check_scales,
    float16_down,
    float16_up,
    from_stored,
    require,
    stored_shape,
    to_stored,
)
from octavo.codecs.rotation import hadamard
from octavo.errors import ConfigError

#: Tokens that share a key channel's scale, channels that share a token's scale.
GROUP = 64
#: How many codes are packed together, longest first.
RUNS = (32, 16, 8)


class Int4Codec:
    name = "int4"
    kernel_id = 4

    def bytes_per_page(self, plane: Plane) -> int:
        if plane.head_dim % RUNS[-1]:
            raise ConfigError(f"int4 needs a head_dim that is a multiple of {RUNS[-1]}, got {plane.head_dim}")
        return plane.n_values // 2 + 4 * _n_scales(plane)

    def rotates(self, plane: Plane) -> bool:
        return plane.role is Role.VALUE or plane.rotate

    def encode(self, x: F32, plane: Plane) -> U8:
        x = check_input(x, plane, self.name)
        if self.rotates(plane):
            x = hadamard(x)
            require(np.isfinite(x), "a value overflows when rotated", plane, self.name, head_axis=1)
        y = to_stored(x, plane)
        scale, minimum = _fit(y, plane, self.name)
        packed = _pack(_round(y, scale, minimum))
        if plane.role is Role.KEY:
            scale, minimum = scale.swapaxes(1, 2), minimum.swapaxes(1, 2)
        return np.concatenate([a.reshape(-1).view(np.uint8) for a in (packed, scale.copy(), minimum.copy())])

    def decode(self, data: U8, plane: Plane) -> F32:
        data = check_bytes(data, self.bytes_per_page(plane), self.name)
        n_heads, rows, length = stored_shape(plane)
        n_codes = plane.n_values // 2
        codes = _unpack(data[:n_codes].reshape(n_heads, rows, length // 2))
        shape = (2, n_heads, -1, rows) if plane.role is Role.KEY else (2, n_heads, rows, -1)
        scale, minimum = data[n_codes:].view(np.float16).reshape(shape)
        if plane.role is Role.KEY:
            scale, minimum = scale.swapaxes(1, 2), minimum.swapaxes(1, 2)
        wide_scale = check_scales(scale, plane, self.name)
        wide_minimum = minimum.astype(np.float32)
        require(np.isfinite(wide_minimum), "a stored minimum is not a number", plane, self.name)
        y = codes.astype(np.float32) * _spread(wide_scale, length) + _spread(wide_minimum, length)
        x = from_stored(y, plane)
        return hadamard(x) if self.rotates(plane) else x


def _n_scales(plane: Plane) -> int:
    n_heads, rows, length = stored_shape(plane)
    return n_heads * rows * -(-length // GROUP)


def _fit(y: F32, plane: Plane, codec: str) -> tuple[F16, F16]:
    """y [n_heads, rows, length] -> scale and minimum, float16 [n_heads, rows, groups along the last axis]."""
    starts = np.arange(0, y.shape[2], GROUP)
    # Adding zero turns a minimum of -0 into +0: which of the two a reduction finds depends on its order.
    lowest: F32 = np.minimum.reduceat(y, starts, axis=2) + np.float32(0)
    highest: F32 = np.maximum.reduceat(y, starts, axis=2)
    minimum = float16_down(lowest)
    require(np.isfinite(minimum), "a minimum is beyond the range of float16 (65504)", plane, codec)
    scale = np.maximum(float16_up((highest - minimum.astype(np.float32)) / np.float32(15)), MIN_SCALE)
    require(np.isfinite(scale), "a scale is beyond the range of float16 (65504)", plane, codec)
    return scale, minimum


def _round(y: F32, scale: F16, minimum: F16) -> U8:
    """Codes of y against a given scale and minimum."""
    length = y.shape[2]
    steps = (y - _spread(minimum.astype(np.float32), length)) / _spread(scale.astype(np.float32), length)
    codes: U8 = np.clip(np.rint(steps), 0, 15).astype(np.uint8)
    return codes


def _spread(per_group: F32, length: int) -> F32:
    """[n_heads, rows, groups] -> [n_heads, rows, length]."""
    return np.repeat(per_group, GROUP, axis=2)[:, :, :length]


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
