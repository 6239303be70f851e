"""Dequantization against the gguf package's, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo.models.loading.dequant import dequantize
from octavo.models.loading.gguf import LAYOUTS
from octavo.models.spec import Tensor

ROWS, COLS = 5, 768


def blocks(dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Random bytes, uint8 [ROWS, row bytes], with the half-precision scales replaced by finite ones."""
    layout = LAYOUTS[dtype]
    data = rng.integers(0, 256, (ROWS * COLS // layout.elements, layout.bytes), dtype=np.uint8)
    if dtype in ("F32", "F16", "BF16"):
        kind = {"F32": np.float32, "F16": np.float16}.get(dtype)
        values = rng.standard_normal((ROWS, COLS)).astype(np.float32)
        if kind is None:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(kind).view(np.uint8)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(dtype, (0,))
    for at in places:
        data[:, at : at + 2] = rng.standard_normal((len(data), 1)).astype(np.float16).view(np.uint8)
    return data.reshape(ROWS, -1)


def tensor(dtype: str, data: np.ndarray, row_order: np.ndarray | None = None) -> Tensor:
    return Tensor("w", dtype, ROWS, COLS, data.reshape(-1), row_order)


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_equals_gguf(dtype: str) -> None:
    data = blocks(dtype, np.random.default_rng(0))
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[dtype])
    got = dequantize(tensor(dtype, data))
    assert got.dtype == np.float32
    assert got.shape == (ROWS, COLS)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got.view(np.uint32), expected.reshape(ROWS, COLS).view(np.uint32))


@pytest.mark.parametrize("dtype", LAYOUTS)
@pytest.mark.parametrize("fill", [0, 255])
def test_extreme_codes(dtype: str, fill: int) -> None:
    layout = LAYOUTS[dtype]
    data = np.full((ROWS, COLS // layout.elements * layout.bytes), fill, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[dtype])
        np.testing.assert_array_equal(dequantize(tensor(dtype, data)), expected.reshape(ROWS, COLS))


@pytest.mark.parametrize("dtype", ["F32", "Q4_K", "Q8_0"])
def test_row_order(dtype: str) -> None:
    data = blocks(dtype, np.random.default_rng(1))
    stored = dequantize(tensor(dtype, data))
    order = np.array([3, 0, 4, 1, 2], dtype=np.int32)
    ordered = tensor(dtype, data, order)
    np.testing.assert_array_equal(dequantize(ordered), stored[order])


def test_reads_from_unaligned_views() -> None:
    for dtype in LAYOUTS:
        data = blocks(dtype, np.random.default_rng(2)).reshape(-1)
        shifted = np.concatenate((np.zeros(1, np.uint8), data))[1:]
        expected = dequantize(tensor(dtype, data))
        np.testing.assert_array_equal(dequantize(tensor(dtype, shifted)), expected)
