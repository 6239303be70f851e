"""Weights as stored -> float32, in numpy. Block layouts are ggml's (ggml-quants.h, ggml-common.h).

Every function takes uint8 [n_blocks, block bytes] and returns float32 [n_blocks, block elements]. Products
are formed in float32 in ggml's order, so the values equal its own bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from octavo.models.loading.gguf import LAYOUTS
from octavo.models.spec import F32, Tensor

U8 = NDArray[np.uint8]


def dequantize(tensor: Tensor) -> F32:
    """float32 [rows, cols], in logical row order. A new array."""
    layout = LAYOUTS[tensor.dtype]
    blocks = tensor.data.reshape(-1, layout.bytes)
    values = _DECODERS[tensor.dtype](blocks).reshape(tensor.rows, tensor.cols)
    return values if tensor.row_order is None else values[tensor.row_order]


def _f16(blocks: U8, at: int) -> F32:
    """float32 [n, 1]: the half-precision number at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _f32(blocks: U8) -> F32:
    return blocks.view("<f4").astype(np.float32)


def _half(blocks: U8) -> F32:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: U8) -> F32:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _nibbles(packed: U8) -> U8:
    """[n, b] -> [n, 2 b]: all low nibbles, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _fifth_bits(blocks: U8, at: int) -> U8:
    """[n, 32]: bit i of the 32-bit mask at byte `at`, shifted to the value 16."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: U8) -> F32:
    """f16 d | 16 bytes of nibbles: d * (q - 8)."""
    return _f16(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: U8) -> F32:
    """f16 d | f16 m | 16 bytes of nibbles: d * q + m."""
    return _f16(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _f16(blocks, 2)


def _q5_0(blocks: U8) -> F32:
    """f16 d | 32 fifth bits | 16 bytes of nibbles: d * (q - 16)."""
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _f16(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: U8) -> F32:
    """f16 d | f16 m | 32 fifth bits | 16 bytes of nibbles: d * q + m."""
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _f16(blocks, 0) * q.astype(np.float32) + _f16(blocks, 2)


def _q8_0(blocks: U8) -> F32:
    """f16 d | 32 signed bytes: d * q."""
    return _f16(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _k_scales(packed: U8) -> tuple[F32, F32]:
    """The 12 scale bytes of Q4_K and Q5_K -> scales and minima, float32 [n, 8, 1] each, of six bits.

    The first four of both lie in the low six bits of bytes 0-3 and 4-7. Of the last four, bytes 8-11 hold the
    low nibbles (scales low, minima high), and the top two bits of bytes 0-3 and 4-7 the rest.
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((a & 63, (c & 15) | ((a >> 6) << 4)), axis=1)
    minima = np.concatenate((b & 63, (c >> 4) | ((b >> 6) << 4)), axis=1)
    return scales.astype(np.float32)[:, :, None], minima.astype(np.float32)[:, :, None]


def _k_affine(blocks: U8, q: U8) -> F32:
    """d * scale * q - dmin * minimum for q [n, 8, 32]; header f16 d | f16 dmin | 12 bytes of scales."""
    scales, minima = _k_scales(blocks[:, 4:16])
    d, dmin = _f16(blocks, 0)[:, :, None], _f16(blocks, 2)[:, :, None]
    return d * scales * q.astype(np.float32) - dmin * minima


def _k_nibbles(packed: U8) -> U8:
    """128 bytes -> [n, 8, 32]: of 32 bytes the low nibbles are one group, the high ones the next."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: U8) -> F32:
    """header (16) | 128 bytes of nibbles, eight groups of 32."""
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:144]))


def _q5_k(blocks: U8) -> F32:
    """header (16) | 32 bytes of fifth bits (bit g of byte i: value i of group g) | 128 of nibbles."""
    groups = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> groups) & np.uint8(1)
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:176]) | (fifth << np.uint8(4)))


def _q6_k(blocks: U8) -> F32:
    """128 bytes of low nibbles | 64 bytes of high bit pairs | 16 signed scales | f16 d: d * scale * (q - 32).

    Two halves of 128 values; in each, four runs of 32: nibbles of the half's 64 bytes (low of both 32s, then
    high of both), bit pairs 0-3 of its 32 bytes.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (_f16(blocks, 208) * scales)[:, :, None] * q


_DECODERS: Mapping[str, Callable[[U8], F32]] = {
    "F32": _f32, "F16": _half, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
