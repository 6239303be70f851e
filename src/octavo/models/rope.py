"""Rotary position embedding: the angles of every position, with the scalings that stretch a trained context.

Everything is computed in float64 and rounded to float32 once, at the end: a float32 angle at position
100,000 is wrong in its third decimal.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.errors import UnsupportedError
from octavo.models.spec import RopeScaling, RopeSpec

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def rope_tables(rope: RopeSpec, n: int) -> tuple[F32, F32]:
    """cos and sin of positions 0 .. n - 1: two float32 [n, rope.dim / 2]. YaRN's attention factor is
    multiplied in."""
    frequencies, factor = rope_frequencies(rope)
    angles = np.arange(n, dtype=np.float64)[:, None] * frequencies
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def rope_frequencies(rope: RopeSpec) -> tuple[F64, float]:
    """Radians per position, float64 [rope.dim / 2], and the factor on cos and sin.

    Raises UnsupportedError where the spec contradicts itself or leaves out what its kind needs.
    """
    if rope.dim <= 0 or rope.dim % 2:
        raise UnsupportedError(f"rotary dimension must be even and positive, got {rope.dim}")
    plain = rope.theta ** (-np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    scaling = rope.scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "explicit":
        if len(scaling.divisors) != rope.dim // 2:
            raise UnsupportedError(f"rope scaling has {len(scaling.divisors)} divisors for {rope.dim // 2} frequencies")
        return plain / np.asarray(scaling.divisors, dtype=np.float64), 1.0
    if scaling.factor <= 0:
        raise UnsupportedError(f"rope scaling factor must be positive, got {scaling.factor}")
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.original_context <= 0:
        raise UnsupportedError(f"rope scaling {scaling.kind!r} needs the context it was trained at")
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, rope, scaling), _yarn_attention_factor(scaling)


def _llama3(plain: F64, scaling: RopeScaling) -> F64:
    """Long waves are divided by the factor, short ones kept, those between blended by how often they turn
    in the trained context (Llama 3.1)."""
    turns = scaling.original_context * plain / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    frequencies: F64 = (1 - blend) * plain / scaling.factor + blend * plain
    return frequencies


def _yarn(plain: F64, rope: RopeSpec, scaling: RopeScaling) -> F64:
    """Interpolation below `beta_slow` turns in the trained context, none above `beta_fast`, a linear ramp
    over the channels between (YaRN, arXiv 2309.00071, section 3.2)."""

    def channel(turns: float) -> float:
        wavelength = scaling.original_context / turns
        return rope.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float64) - low) / width, 0.0, 1.0)
    frequencies: F64 = plain / scaling.factor * ramp + plain * (1 - ramp)
    return frequencies


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
