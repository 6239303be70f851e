"""Orthonormal Walsh-Hadamard transform over head_dim, in float32 with a fixed order of additions.

Rotating a head's vector spreads an outlier channel over all of them, so that one group scale serves them
better (QuaRot, arXiv 2404.00456). Scores do not change when query and key are both rotated, and the
transform is its own inverse up to rounding.

Definition, for a block of n = 2**m channels: for h = 1, 2, 4, ..., n / 2, every pair (i, i + h) with bit h
of i clear becomes (x[i] + x[i + h], x[i] - x[i + h]); at the end each value is multiplied by float32(1 /
sqrt(n)). Each step is one rounded float32 operation, so any implementation that follows this order gives
the same bits.
"""

from __future__ import annotations

import math

import numpy as np

from octavo.codecs.base import F32


def block_size(head_dim: int) -> int:
    """The largest power of two that divides head_dim; the transform is block-diagonal with blocks of this
    size."""
    return head_dim & -head_dim


def hadamard(x: F32) -> F32:
    """float32 [..., head_dim] -> float32 [..., head_dim], a new array. Overflow gives infinities, which
    codecs refuse."""
    head_dim = x.shape[-1]
    n = block_size(head_dim)
    y = x.astype(np.float32, copy=True).reshape(*x.shape[:-1], head_dim // n, n)
    with np.errstate(over="ignore", invalid="ignore"):
        h = 1
        while h < n:
            pairs = y.reshape(*y.shape[:-1], n // (2 * h), 2, h)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            y = np.stack((a + b, a - b), axis=-2).reshape(y.shape)
            h *= 2
        y *= np.float32(1.0 / math.sqrt(n))
    return y.reshape(x.shape)
