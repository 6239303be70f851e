"""int8: 8 bits per value, asymmetric: keys per channel over the page's tokens, values per token. Not rotated.

Groups, scales and minima: `affine`, with 255 levels. Effective bits: keys 8 + 32 / min(page_size, 64), values
8 + 32 / 64 where head_dim is a multiple of 64; at page_size 32 and head_dim 64, 8.75 over both.

Why keys per channel: with a key bias (Qwen2) some channels are a hundred times the rest, so a scale that a token's
channels share loses the rest.

Byte layout, T = ceil(page_size / 64), G = ceil(head_dim / 64):

    keys     codes    int8     [n_heads, head_dim / 2, page_size, 2]
             scales   float16  [n_heads, T, head_dim]
             minima   float16  [n_heads, T, head_dim]
    values   codes    int8     [n_heads, page_size / 2, head_dim, 2]
             scales   float16  [n_heads, G, page_size]
             minima   float16  [n_heads, G, page_size]

The codes of all heads come first, so that each head's codes begin at a multiple of 64 bytes; then all scales, then all
minima.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.codecs.affine import codes_of, dequantize, head_bytes, quantize, scale_bytes, stored_codes
from octavo.codecs.base import F32, U8, Plane
from octavo.codecs.layout import check_bytes, check_input, from_stored, stored_shape, to_stored

LEVELS = 255


class Int8Codec:
    name = "int8"
    kernel_id = 3

    def bytes_per_page(self, plane: Plane) -> int:
        return plane.n_values + scale_bytes(plane)

    def rotates(self, plane: Plane) -> bool:
        return False

    def encode(self, x: F32, plane: Plane) -> U8:
        y = to_stored(check_input(x, plane, self.name), plane)
        codes, stored = quantize(y, LEVELS, plane, self.name)
        return np.concatenate([stored_codes(codes, LEVELS).reshape(-1), stored])

    def decode(self, data: U8, plane: Plane, n_tokens: int | None = None) -> F32:
        data = check_bytes(data, self.bytes_per_page(plane), self.name)
        n_heads, rows, length = stored_shape(plane)
        codes = codes_of(data[: plane.n_values].reshape(n_heads, rows // 2, 2 * length), LEVELS)
        return from_stored(dequantize(codes, data[plane.n_values :], plane, self.name, n_tokens), plane)

    def head_bytes(self, plane: Plane) -> NDArray[np.int64]:
        return head_bytes(plane, plane.n_values)
