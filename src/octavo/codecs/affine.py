"""Affine quantization as int8 and int4 share it: a scale and a minimum, both float16, for every group of a row.

A row is what `layout.to_stored` gives: one key channel over the page's tokens, or one token's channels of a head. A
group is up to GROUP consecutive values of a row, the last shorter where the row's length is no multiple. So keys are
scaled per channel (KIVI, arXiv 2402.02750), whose minimum absorbs the large constant that a key bias leaves in a
channel, and values per token.

minimum = min(x) rounded down to float16; scale = (max(x) - minimum) / levels rounded up to float16, levels = 2**bits -
1, so that the steps from the stored minimum reach the maximum; code = round_half_even((x - minimum) / scale), from 0 to
levels, taken against both as stored; value = code * scale + minimum. A group whose values all equal the stored minimum
takes MIN_SCALE.

Codes are stored less (levels + 1) / 2, in two's complement (small codes keep small what rounding a weight costs), and
in pairs of rows, [n_heads, rows / 2, length, 2] (kernels multiply 16-bit integers whose products add up in pairs).
Bytes after the codes: scales float16 [n_heads, groups, rows], then minima of the same shape.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.codecs.base import F32, U8, Plane, Role
from octavo.codecs.layout import (
    F16,
    MIN_SCALE,
    check_scales,
    float16_down,
    float16_up,
    require,
    split_heads,
    stored_shape,
)

#: Consecutive values of a row that share a scale: tokens of a key channel, channels of a token's value.
GROUP = 64


def scale_bytes(plane: Plane) -> int:
    """Bytes of a plane's scales and minima."""
    n_heads, rows, length = stored_shape(plane)
    return 4 * n_heads * rows * -(-length // GROUP)


def head_bytes(plane: Plane, code_bytes: int) -> NDArray[np.int64]:
    """`Codec.head_bytes`: the codes of all heads, their scales, their minima."""
    return split_heads(plane.n_heads, [code_bytes, scale_bytes(plane) // 2, scale_bytes(plane) // 2])


def stored_codes(codes: U8, levels: int) -> U8:
    """Codes uint8 [n_heads, rows, length], 0 to levels -> contiguous [n_heads, rows / 2, length * 2], as stored but for
    packing: the codes of two rows in turn, each less (levels + 1) / 2 in as many bits as `levels` has."""
    n_heads, rows, length = codes.shape
    pairs = codes.reshape(n_heads, rows // 2, 2, length).swapaxes(2, 3)
    return np.ascontiguousarray(pairs).reshape(n_heads, rows // 2, 2 * length) ^ np.uint8((levels + 1) // 2)


def codes_of(stored: U8, levels: int) -> U8:
    """The inverse of `stored_codes`."""
    n_heads, half, double = stored.shape
    pairs = (stored ^ np.uint8((levels + 1) // 2)).reshape(n_heads, half, double // 2, 2).swapaxes(2, 3)
    return np.ascontiguousarray(pairs).reshape(n_heads, 2 * half, double // 2)


def quantize(y: F32, levels: int, plane: Plane, codec: str) -> tuple[U8, U8]:
    """y [n_heads, rows, length] -> codes uint8 of that shape, and the bytes of scales and minima. Raises
    CodecRangeError."""
    starts = np.arange(0, y.shape[2], GROUP)
    # Adding zero turns a minimum of -0 into +0: which of the two a reduction finds depends on its order.
    lowest: F32 = np.minimum.reduceat(y, starts, axis=2) + np.float32(0)
    highest: F32 = np.maximum.reduceat(y, starts, axis=2)
    minimum = float16_down(lowest)
    require(np.isfinite(minimum), "a minimum is beyond the range of float16 (65504)", plane, codec)
    scale = np.maximum(float16_up((highest - minimum.astype(np.float32)) / np.float32(levels)), MIN_SCALE)
    require(np.isfinite(scale), "a scale is beyond the range of float16 (65504)", plane, codec)
    steps = (y - _spread(minimum, y.shape[2])) / _spread(scale, y.shape[2])
    codes: U8 = np.clip(np.rint(steps), 0, levels).astype(np.uint8)
    stored = np.stack([_groups_first(scale), _groups_first(minimum)])
    return codes, stored.reshape(-1).view(np.uint8)


def dequantize(codes: U8, stored: U8, plane: Plane, codec: str, n_tokens: int | None = None) -> F32:
    """The inverse: codes [n_heads, rows, length] -> float32 of that shape; of the first n_tokens tokens, if so many are
    said to be there. Raises CodecRangeError on a bad scale."""
    n_heads, rows, _ = codes.shape
    scale, minimum = stored.view(np.float16).reshape(2, n_heads, -1, rows)
    if plane.role is Role.KEY:
        codes = codes[:, :, :n_tokens]
    else:
        codes, scale, minimum = codes[:, :n_tokens], scale[..., :n_tokens], minimum[..., :n_tokens]
    length = codes.shape[2]
    wide_scale = check_scales(scale, plane, codec)
    require(np.isfinite(minimum), "a stored minimum is not a number", plane, codec)
    result: F32 = codes.astype(np.float32) * _spread(_groups_first(wide_scale), length)
    return result + _spread(_groups_first(minimum), length)


def _groups_first(per_group: F32 | F16) -> F32 | F16:
    """[n_heads, rows, groups] <-> [n_heads, groups, rows]."""
    return per_group.swapaxes(1, 2)


def _spread(per_group: F32 | F16, length: int) -> F32:
    """[n_heads, rows, groups] -> float32 [n_heads, rows, length]."""
    return np.repeat(per_group.astype(np.float32), GROUP, axis=2)[:, :, :length]
