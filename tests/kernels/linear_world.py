"""Random stored weights of every type, and what a linear layer over them must give."""

from __future__ import annotations

from functools import cache
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from octavo.models.spec import Tensor
from octavo.ops import _cpu

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

FLOAT_TYPES = ("F32", "F16", "BF16")
QUANTIZED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
TYPES = FLOAT_TYPES + QUANTIZED_TYPES

#: Offsets of the f16 scales in a stored block.
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # fmt: skip


@cache
def context(threads: int = 2, isa: str = "auto") -> Any:
    return _cpu.Context(threads, isa)


def isas() -> list[str]:
    return [isa for isa in ("portable", "avx2", "avx512") if _cpu.have_isa(isa)]


def block_of(dtype: str) -> tuple[int, int]:
    """(inputs, bytes) of one stored block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]


def random_weight(dtype: str, rows: int, cols: int, seed: int = 0, scale: float = 0.05) -> Tensor:
    """Every code is drawn uniformly, so that extremes occur; scales are normal and of both signs."""
    rng = np.random.default_rng(seed)
    if dtype in FLOAT_TYPES:
        w = (rng.standard_normal((rows, cols)) * scale).astype(np.float32)
        data = gguf.quants.quantize(w, GGMLQuantizationType[dtype]).view(np.uint8).reshape(rows, -1)
        return tensor(dtype, rows, cols, data)
    block, size = block_of(dtype)
    data = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    for offset in SCALES[dtype]:
        values = (rng.standard_normal((rows, cols // block, 1)) * scale).astype(np.float16)
        data[:, :, offset : offset + 2] = values.view(np.uint8)
    return tensor(dtype, rows, cols, data)


def tensor(dtype: str, rows: int, cols: int, data: U8, name: str = "w") -> Tensor:
    return Tensor(name, dtype, rows, cols, np.ascontiguousarray(data).reshape(-1))


def dequantize(t: Tensor) -> F64:
    """float64 [rows, cols] by the gguf package, in logical row order."""
    w = gguf.quants.dequantize(t.data.reshape(t.rows, -1), GGMLQuantizationType[t.dtype])
    w = np.asarray(w, dtype=np.float64).reshape(t.rows, t.cols)
    return w if t.row_order is None else w[t.row_order]


def quantize_rows(x: F32) -> tuple[NDArray[np.int16], F32]:
    """The definition of quantized activations: codes int16 [n, cols] and scales float32 [n, cols / 32]."""
    groups = x.reshape(len(x), -1, 32)
    peak = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(32767) / peak
        codes = np.rint(groups * inverse)
    usable = np.isfinite(inverse) & np.isfinite(peak)
    codes = np.where(usable, codes, 0).astype(np.int16).reshape(x.shape)
    scales = np.where(usable, peak / np.float32(32767), np.where(np.isfinite(peak), 0, np.nan))
    return codes, scales.astype(np.float32)[..., 0]


def read_as(dtype: str, x: F32) -> F64:
    """x as a layer over `dtype` weights reads it."""
    if dtype in FLOAT_TYPES:
        return x.astype(np.float64)
    codes, scales = quantize_rows(x)
    return (codes.reshape(len(x), -1, 32) * scales[..., None].astype(np.float64)).reshape(x.shape)


def rounding_bound(x: F64, w: F64, steps: int) -> F64:
    """How far float32 accumulation in `steps` roundings may stray from exact x @ w.T."""
    return (steps + 4) * 2.0**-24 * (np.abs(x) @ np.abs(w).T) + 1e-30


def activations(n: int, cols: int, seed: int = 1) -> F32:
    """Heavy-tailed, with a few outlier channels, as hidden states are."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, cols)) ** 3
    x[:, rng.integers(0, cols, max(1, cols // 100))] *= 30
    return x.astype(np.float32)


def stored(t: Tensor) -> Any:
    return _cpu.Stored(t.name, t.dtype, t.rows, t.cols, t.data, t.row_order)


def linear(weights: Tensor | list[Tensor], bias: F32 | None = None, **where: Any) -> Any:
    stack = [weights] if isinstance(weights, Tensor) else weights
    return _cpu.Linear(context(**where), [stored(t) for t in stack], bias)


def forward(layer: Any, x: F32, *, norm: F32 | None = None, eps: float = 0.0, **where: Any) -> F32:
    out = np.full((len(x), layer.rows), np.nan, np.float32)
    _cpu.linear(context(**where), layer, x, out, norm, eps)
    return out


def rms_norm(x: F32, weight: F32, eps: float) -> F64:
    v = x.astype(np.float64)
    return v / np.sqrt((v * v).mean(-1, keepdims=True) + eps) * weight
