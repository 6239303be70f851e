"""int8: 8 bits per value with a float16 scale per token, head and group of 32 channels (8.5 effective bits).

A group is up to GROUP consecutive channels of one head of one token; the last is shorter where head_dim is no
multiple of GROUP. Symmetric, after llama.cpp's q8_0: scale = max|x| / 127, rounded up to float16;
code = round_half_even(x / scale) in [-127, 127], taken against the scale as stored; value = code * scale.
A group whose scale rounds to nothing (all zeros) takes MIN_SCALE. Nothing is rotated.

Byte layout, G = ceil(head_dim / GROUP):

    keys     codes   int8     [n_heads, head_dim, page_size]
             scales  float16  [n_heads, G, page_size]
    values   codes   int8     [n_heads, page_size, head_dim]
             scales  float16  [n_heads, page_size, G]

The codes of all heads come first, so that each head's codes begin at a multiple of 64 bytes.
"""

from __future__ import annotations

import numpy as np

from octavo.codecs.base import F32, U8, Plane, Role
from octavo.codecs.layout import (
    MIN_SCALE,
    check_bytes,
    check_input,
    check_scales,
    float16_up,
    from_stored,
    require,
    stored_shape,
    to_stored,
)

#: Channels that share a scale.
GROUP = 32


class Int8Codec:
    name = "int8"
    kernel_id = 3

    def bytes_per_page(self, plane: Plane) -> int:
        return plane.n_values + 2 * plane.page_size * plane.n_heads * _n_groups(plane)

    def rotates(self, plane: Plane) -> bool:
        return False

    def encode(self, x: F32, plane: Plane) -> U8:
        y = to_stored(check_input(x, plane, self.name), plane)
        axis = _channel_axis(plane)
        starts = np.arange(0, plane.head_dim, GROUP)
        peak: F32 = np.maximum.reduceat(np.abs(y), starts, axis=axis)
        scale = np.maximum(float16_up(peak / np.float32(127)), MIN_SCALE)
        require(np.isfinite(scale), "a scale is beyond the range of float16 (65504)", plane, self.name)
        codes = np.rint(y / _per_channel(scale.astype(np.float32), plane)).astype(np.int8)
        return np.concatenate([codes.reshape(-1).view(np.uint8), scale.reshape(-1).view(np.uint8)])

    def decode(self, data: U8, plane: Plane) -> F32:
        data = check_bytes(data, self.bytes_per_page(plane), self.name)
        codes = data[: plane.n_values].view(np.int8).reshape(stored_shape(plane))
        shape = list(stored_shape(plane))
        shape[_channel_axis(plane)] = _n_groups(plane)
        scale = check_scales(data[plane.n_values :].view(np.float16).reshape(shape), plane, self.name)
        return from_stored(codes.astype(np.float32) * _per_channel(scale, plane), plane)


def _n_groups(plane: Plane) -> int:
    return -(-plane.head_dim // GROUP)


def _channel_axis(plane: Plane) -> int:
    return 1 if plane.role is Role.KEY else 2


def _per_channel(scale: F32, plane: Plane) -> F32:
    """Scales of groups repeated for their channels."""
    group_of_channel = np.arange(plane.head_dim) // GROUP
    return scale.take(group_of_channel, axis=_channel_axis(plane))
