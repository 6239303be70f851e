"""Linear layers of the cpu backend, for every type of stored weight and every instruction set of this machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.errors import LoadError, UnsupportedError
from octavo.ops import _cpu
from tests.kernels.linear_world import (
    FLOAT_TYPES,
    QUANTIZED_TYPES,
    SCALES,
    TYPES,
    activations,
    block_of,
    context,
    dequantize,
    forward,
    isas,
    linear,
    quantize_rows,
    random_weight,
    read_as,
    rms_norm,
    rounding_bound,
    stored,
    tensor,
)


def shapes(dtype: str) -> list[tuple[int, int]]:
    """(rows, cols): one row, one block, odd tails, several tiles; odd widths where the type has them."""
    if dtype in FLOAT_TYPES:
        return [(1, 1), (8, 7), (9, 33), (24, 64), (133, 100)]
    block = block_of(dtype)[0]
    return [(1, block), (8, block), (13, 3 * block), (133, 2 * block)]


def steps(dtype: str, cols: int) -> int:
    """Float roundings on the way to one output."""
    return cols if dtype in FLOAT_TYPES else 3 * cols // 16


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", TYPES)
def test_equals_an_oracle_that_quantizes_the_same_way(dtype: str, isa: str) -> None:
    for rows, cols in shapes(dtype):
        weight = random_weight(dtype, rows, cols)
        w, layer = dequantize(weight), linear(weight, isa=isa)
        for n in (1, 2, 3, 4, 5, 11, 70):
            x = activations(n, cols, seed=n)
            seen = read_as(dtype, x)
            error = np.abs(forward(layer, x, isa=isa) - seen @ w.T)
            assert (error <= rounding_bound(seen, w, steps(dtype, cols))).all(), (rows, cols, n)


@pytest.mark.parametrize("dtype", TYPES)
def test_stays_close_to_float_activations(dtype: str) -> None:
    """The loss that the activations' 16 bits cost: below 1e-4 of the output, outliers and all."""
    rows, cols = 96, 2 * 256
    weight, x = random_weight(dtype, rows, cols), activations(64, cols)
    exact = x.astype(np.float64) @ dequantize(weight).T
    y = forward(linear(weight), x)
    assert np.linalg.norm(y - exact) < 1e-4 * np.linalg.norm(exact)
    assert np.abs(y - exact).max() < 3e-4 * np.abs(exact).max()


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_does_not_depend_on_the_call(dtype: str, isa: str) -> None:
    """Bit for bit: alone, among 70, at another place, and with other numbers of threads."""
    rows, cols, n = 133, 512, 70
    weight, x = random_weight(dtype, rows, cols), activations(n, cols)
    layer = linear(weight, isa=isa)
    together = forward(layer, x, isa=isa)
    for i in range(n):
        assert (forward(layer, x[i : i + 1], isa=isa) == together[i]).all(), i
    for threads in (1, 3, 8):
        assert (forward(layer, x, threads=threads, isa=isa) == together).all(), threads
        assert (forward(layer, x[5:6], threads=threads, isa=isa) == together[5]).all(), threads
    for length in range(1, 10):
        assert (forward(layer, x[7 : 7 + length], isa=isa) == together[7 : 7 + length]).all(), length
    order = np.random.default_rng(3).permutation(n)
    assert (forward(layer, np.ascontiguousarray(x[order]), isa=isa) == together[order]).all()


@pytest.mark.parametrize("dtype", QUANTIZED_TYPES)
def test_instruction_sets_agree_exactly_at_the_integer_stage(dtype: str) -> None:
    """Scales are powers of two and sums stay below 2^24, so that the float stage rounds nothing."""
    rng = np.random.default_rng(5)
    block, size = block_of(dtype)
    rows = 24
    data = rng.integers(0, 256, (rows, 1, size), dtype=np.uint8)
    for offset in SCALES[dtype]:
        data[:, :, offset : offset + 2] = np.array([1], np.float16).view(np.uint8)
    if dtype in ("Q4_K", "Q5_K"):
        data[:, :, 4:16] &= 1  # scales and minima of 0 or 1
    if dtype == "Q6_K":
        data[:, :, 192:208] = rng.choice([1, 255], (rows, 1, 16))
    weight = tensor(dtype, rows, block, data)
    x = rng.integers(-40, 41, (6, block)).astype(np.float32)
    for group in range(block // 32):  # one extreme code in each group makes its scale exactly 1
        place = rng.integers(0, 32, 6)
        x[np.arange(6), 32 * group + place] = rng.choice([-32767, 32767], 6)
    exact = x.astype(np.int64) @ dequantize(weight).astype(np.int64).T
    assert np.abs(exact).max() < 2**24
    for isa in isas():
        assert (forward(linear(weight, isa=isa), x, isa=isa) == exact).all(), isa


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", QUANTIZED_TYPES)
def test_extreme_codes_do_not_overflow(dtype: str, isa: str) -> None:
    """All codes at one end, all activations at theirs: sums as large as they can be."""
    block, size = block_of(dtype)
    for fill in (0x00, 0xFF, 0x80, 0x7F):
        data = np.full((9, 2, size), fill, np.uint8)
        for offset in SCALES[dtype]:
            data[:, :, offset : offset + 2] = np.array([-0.5], np.float16).view(np.uint8)
        weight = tensor(dtype, 9, 2 * block, data)
        w = dequantize(weight)
        for sign in (1, -1):
            x = np.full((5, 2 * block), sign * 3.0, np.float32)
            exact = read_as(dtype, x) @ w.T
            y = forward(linear(weight, isa=isa), x, isa=isa)
            assert (np.abs(y - exact) <= rounding_bound(read_as(dtype, x), w, 200)).all(), (fill, sign)


@pytest.mark.parametrize("isa", isas())
def test_activation_codes_are_as_defined(isa: str) -> None:
    x = activations(40, 96)
    x[3, :32] = 0
    x[4, 32:64] = 1e-38  # 32767 / 1e-38 is infinite: the group counts as zero
    x[5, 40] = np.nan
    x[6, 70] = -np.inf
    x[7] = np.linspace(-1, 1, 96)
    x[8, :32] = np.arange(32) + 0.5
    x[8, 0] = 32767  # scale 1: ties go to even
    codes = np.empty(x.shape, np.int16)
    scales = np.empty((40, 3), np.float32)
    _cpu.quantize_rows(context(isa=isa), x, codes, scales)
    expected_codes, expected_scales = quantize_rows(x)
    assert (codes == expected_codes).all()
    assert np.array_equal(scales, expected_scales, equal_nan=True)
    assert (codes[8, 1:7] == [2, 2, 4, 4, 6, 6]).all()
    assert np.isnan(scales[5, 1])
    assert np.isnan(scales[6, 2])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", ["F16", "Q4_1", "Q6_K", "Q8_0"])
def test_a_nan_or_infinity_reaches_every_output_of_its_row_and_no_other(dtype: str, isa: str) -> None:
    layer = linear(random_weight(dtype, 21, 256), isa=isa)
    clean = activations(6, 256)
    expected = forward(layer, clean, isa=isa)
    for bad in (np.nan, np.inf, -np.inf):
        x = clean.copy()
        x[2, 100] = bad
        y = forward(layer, x, isa=isa)
        assert not np.isfinite(y[2]).any()
        assert (np.delete(y, 2, 0) == np.delete(expected, 2, 0)).all()
        # Scratch memory is full of the poisoned call's values now.
        assert (forward(layer, clean, isa=isa) == expected).all()


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", TYPES)
def test_zero_scales_and_zero_inputs_give_zero(dtype: str, isa: str) -> None:
    block, size = block_of(dtype)
    cols = max(block, 32)
    data = np.random.default_rng(0).integers(0, 256, (11, cols // block, size), dtype=np.uint8)
    for offset in SCALES.get(dtype, ()):
        data[:, :, offset : offset + 2] = 0
    zero = tensor(dtype, 11, cols, np.zeros_like(data) if dtype in FLOAT_TYPES else data)
    assert (forward(linear(zero, isa=isa), activations(5, cols), isa=isa) == 0).all()
    weight = random_weight(dtype, 11, cols)
    assert (forward(linear(weight, isa=isa), np.zeros((5, cols), np.float32), isa=isa) == 0).all()


def test_stacks_types_with_bias_norm_and_row_order() -> None:
    cols, eps = 512, 1e-5
    rng = np.random.default_rng(7)
    order = rng.permutation(40).astype(np.int32)
    stack = [
        random_weight("Q4_K", 19, cols, seed=1),
        replace(random_weight("Q8_0", 40, cols, seed=2), row_order=order),
        random_weight("F16", 5, cols, seed=3),
    ]
    bias = rng.standard_normal(64).astype(np.float32)
    norm = rng.standard_normal(cols).astype(np.float32)
    x = activations(9, cols)
    y = forward(linear(stack, bias), x, norm=norm, eps=eps)
    normed = rms_norm(x, norm, eps)
    exact = np.concatenate([normed @ dequantize(t).T for t in stack], axis=1) + bias
    assert np.abs(y - exact).max() < 2e-4 * np.abs(exact).max()
    # Each part alone gives the same bits as in the stack.
    alone = forward(linear(stack[1], bias[19:59].copy()), x, norm=norm, eps=eps)
    assert (alone == y[:, 19:59]).all()
    straight = forward(linear(replace(stack[1], row_order=None)), x, norm=norm, eps=eps)
    assert (straight[:, order] + bias[19:59] == alone).all()


def test_adds_in_place_and_writes_nothing_else() -> None:
    layer = linear(random_weight("Q4_1", 13, 64))
    x = activations(6, 64)
    y = forward(layer, x)
    memory = np.full((8, 13), 7.5, np.float32)
    _cpu.linear(context(), layer, x, memory[1:7], add=True)
    assert (memory[1:7] == y + np.float32(7.5)).all()
    assert (memory[[0, 7]] == 7.5).all()


def test_no_rows_is_no_work() -> None:
    layer = linear(random_weight("Q4_1", 13, 64))
    assert forward(layer, np.empty((0, 64), np.float32)).shape == (0, 13)


def test_scratch_memory_is_reused() -> None:
    own = _cpu.Context(2)
    layer = _cpu.Linear(own, [stored(random_weight("Q4_0", 64, 256))])
    x, out = activations(33, 256), np.empty((33, 64), np.float32)
    _cpu.linear(own, layer, x, out)
    before = own.scratch_bytes
    for n in (1, 33, 7):
        _cpu.linear(own, layer, x[:n], out[:n])
    assert own.scratch_bytes == before


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_damaged_weight_is_refused_at_load(dtype: str, bad: float) -> None:
    weight = random_weight(dtype, 20, 512)
    block, size = block_of(dtype)
    for offset in SCALES.get(dtype, (0,)):
        data = weight.data.copy().reshape(20, 512 // block, size)
        kind = {"F32": np.float32, "BF16": None}.get(dtype, np.float16)
        value = np.array([bad], np.float32).view(np.uint8)[2:] if kind is None else np.array([bad], kind).view(np.uint8)
        data[17, -1, offset : offset + len(value)] = value
        with pytest.raises(LoadError, match=rf"w \({dtype} \[20, 512\]\): stored row 17 .* NaN or infinite"):
            linear(replace(weight, data=data.reshape(-1)))


def test_impossible_weights_are_refused_with_what_is_wrong() -> None:
    good = random_weight("Q4_0", 8, 64)
    with pytest.raises(UnsupportedError, match=r"IQ2_XS.*reads F32, F16"):
        linear(replace(good, dtype="IQ2_XS"))
    with pytest.raises(LoadError, match="has 288 bytes, expected 320"):
        linear(replace(good, dtype="Q4_1"))
    with pytest.raises(LoadError, match="multiple of 256"):
        linear(replace(good, dtype="Q4_K"))
    with pytest.raises(LoadError, match=r"row_order\[3\] = 8"):
        linear(replace(good, row_order=np.array([0, 1, 2, 8, 4, 5, 6, 7], np.int32)))
    with pytest.raises(LoadError, match=r"96 columns.*64"):
        linear([good, random_weight("Q4_0", 8, 96)])
    with pytest.raises(ValueError, match="bias has 7 values for 8 rows"):
        linear(good, np.zeros(7, np.float32))


def test_arrays_of_the_wrong_kind_are_refused_not_copied() -> None:
    layer, ctx = linear(random_weight("Q4_0", 8, 64)), context()
    x, out = np.zeros((3, 64), np.float32), np.zeros((3, 8), np.float32)
    with pytest.raises(ValueError, match=r"x: expected a C-contiguous float32 array \[n, 64\], got float64 \[3, 64\]"):
        _cpu.linear(ctx, layer, x.astype(np.float64), out)
    with pytest.raises(ValueError, match=r"x: .* got float32 \[3, 63\]"):
        _cpu.linear(ctx, layer, x[:, :63].copy(), out)
    with pytest.raises(ValueError, match=r"x: .* strides"):
        _cpu.linear(ctx, layer, np.zeros((3, 128), np.float32)[:, ::2], out)
    with pytest.raises(ValueError, match=r"out: .*\[3, 8\], got float32 \[2, 8\]"):
        _cpu.linear(ctx, layer, x, out[:2])
    with pytest.raises(ValueError, match="norm: "):
        _cpu.linear(ctx, layer, x, out, np.zeros(63, np.float32), 1e-5)
    out.flags.writeable = False
    with pytest.raises(TypeError):
        _cpu.linear(ctx, layer, x, out)
