"""The numpy codecs: exact sizes, error bounds, extremes, errors that name the culprit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.codecs.base import F32, Codec, Plane, Role
from octavo.codecs.registry import codec_names, get_codec
from octavo.codecs.rotation import block_size, hadamard
from octavo.errors import CodecRangeError, ConfigError

PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 256)
HEADS = (1, 3, 5)

codecs = pytest.mark.parametrize("codec", [get_codec(n) for n in codec_names()], ids=codec_names())
quantized = pytest.mark.parametrize("codec", [get_codec("int8"), get_codec("int4")], ids=("int8", "int4"))
roles = pytest.mark.parametrize("role", list(Role))


def sample(plane: Plane, seed: int = 0) -> F32:
    """Gaussian values with a few strong channels, as keys have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((plane.page_size, plane.n_heads, plane.head_dim)).astype(np.float32)
    x[:, :, 3] *= 12
    x[:, :, -1] += 40
    return x


def stored_basis(codec: Codec, x: F32, plane: Plane) -> F32:
    return hadamard(x) if codec.rotates(plane) else x


def step(codec: Codec, x: F32, plane: Plane) -> F32:
    """The distance between neighbouring codes for every value of x, computed anew from the rule, float32,
    x's shape."""
    y = stored_basis(codec, x, plane).astype(np.float64)
    out = np.empty_like(y)
    levels = {"int8": 255, "int4": 15}[codec.name]
    axis, length = (0, plane.page_size) if plane.role is Role.KEY else (2, plane.head_dim)
    for g in range(0, length, 64):
        index = [slice(None)] * 3
        index[axis] = slice(g, g + 64)
        part = y[tuple(index)]
        out[tuple(index)] = (part.max(axis=axis, keepdims=True) - part.min(axis=axis, keepdims=True)) / levels
    return out.astype(np.float32)


def rms(x: F32) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@codecs
@roles
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("n_heads", HEADS)
def test_size_is_exact_and_values_come_back(
    codec: Codec, role: Role, page_size: int, head_dim: int, n_heads: int
) -> None:
    plane = Plane(role, page_size, n_heads, head_dim, rotate=True)
    x = sample(plane)
    data = codec.encode(x, plane)
    assert data.dtype == np.uint8
    assert data.shape == (codec.bytes_per_page(plane),)
    y = codec.decode(data, plane)
    assert y.shape == x.shape
    assert y.dtype == np.float32
    assert np.array_equal(data, codec.encode(x.copy(order="F"), plane))
    limit = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "int8": None, "int4": None}[codec.name]
    if limit is not None:
        assert (np.abs(y - x) <= np.maximum(limit * np.abs(x), 0 if codec.name == "f32" else 2.0**-25)).all()
    else:
        # Half a step, with room for the outward rounding of scale and minimum to float16 and for float32.
        error = np.abs(stored_basis(codec, y - x, plane))
        peak = np.abs(stored_basis(codec, x, plane)).max()
        assert (error <= 0.5 * step(codec, x, plane) + 2**-9 * peak / 15 + 1e-5 * peak).all()


@pytest.mark.parametrize(
    ("page_size", "head_dim", "codec", "key_bits", "value_bits"),
    [
        (32, 64, "f32", 32, 32),
        (32, 64, "f16", 16, 16),
        (32, 64, "bf16", 16, 16),
        (16, 64, "int8", 10, 8.5),
        (32, 64, "int8", 9, 8.5),
        (64, 128, "int8", 8.5, 8.5),
        (32, 80, "int8", 9, 8.8),
        (16, 64, "int4", 6, 4.5),
        (32, 64, "int4", 5, 4.5),
        (64, 128, "int4", 4.5, 4.5),
        (128, 128, "int4", 4.5, 4.5),
        (32, 80, "int4", 5, 4.8),
    ],
)
def test_effective_bits(page_size: int, head_dim: int, codec: str, key_bits: float, value_bits: float) -> None:
    for role, bits in ((Role.KEY, key_bits), (Role.VALUE, value_bits)):
        plane = Plane(role, page_size, 3, head_dim)
        assert get_codec(codec).bytes_per_page(plane) * 8 / plane.n_values == pytest.approx(bits)


@roles
@pytest.mark.parametrize("seed", range(3))
def test_error_falls_with_bits(role: Role, seed: int) -> None:
    plane = Plane(role, 32, 3, 64, rotate=True)
    x = np.random.default_rng(seed).standard_normal((32, 3, 64)).astype(np.float32)
    errors = []
    for name in ("f32", "f16", "bf16", "int8", "int4"):
        codec = get_codec(name)
        errors.append(rms(codec.decode(codec.encode(x, plane), plane) - x) / rms(x))
    assert errors[0] == 0
    assert errors == sorted(errors)
    assert errors[3] < 0.01 < errors[4] < 0.1


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@roles
def test_encoding_a_decoded_page_gives_the_same_bytes(name: str, role: Role) -> None:
    codec, plane = get_codec(name), Plane(role, 32, 3, 80)
    data = codec.encode(sample(plane), plane)
    assert np.array_equal(codec.encode(codec.decode(data, plane), plane), data)


@given(st.data())
def test_stored_order_of_exact_codecs(data: st.DataObject) -> None:
    """Keys lie channel-major, values token-major."""
    role = data.draw(st.sampled_from(list(Role)))
    plane = Plane(role, data.draw(st.sampled_from(PAGE_SIZES)), data.draw(st.integers(1, 4)), 8)
    x = np.arange(plane.n_values, dtype=np.float32).reshape(plane.page_size, plane.n_heads, 8)
    flat = get_codec("f32").encode(x, plane).view(np.float32)
    t, h, c = (data.draw(st.integers(0, n - 1)) for n in x.shape)
    index = (h * 8 + c) * plane.page_size + t if role is Role.KEY else (h * plane.page_size + t) * 8 + c
    assert flat[index] == x[t, h, c]


@pytest.mark.parametrize(
    ("name", "channels", "length", "channel", "token", "byte", "low", "high"),
    [
        # Of two channels in turn: token 13 of channel 5 is the 27th of its pair of rows.
        ("int8", 8, 32, 5, 13, 2 * 64 + 27, 0x7F, 0x7F),
        ("int8", 8, 16, 4, 13, 2 * 32 + 26, 0x7F, 0x7F),
        # Runs of 32 codes in 16 bytes, the first half in the low four bits: tokens 0 to 15 of two channels.
        ("int4", 8, 32, 2, 5, 32 + 10, 0x7, 0x8),
        ("int4", 8, 32, 3, 5, 32 + 11, 0x7, 0x8),
        ("int4", 8, 32, 2, 13, 32 + 10, 0x8, 0x7),
        ("int4", 8, 32, 3, 21, 32 + 16 + 11, 0x7, 0x8),
        ("int4", 8, 32, 7, 31, 96 + 16 + 15, 0x8, 0x7),
    ],
)
def test_packing_of_keys(
    name: str, channels: int, length: int, channel: int, token: int, byte: int, low: int, high: int
) -> None:
    plane = Plane(Role.KEY, length, 1, channels)
    x = np.zeros((length, 1, channels), np.float32)
    x[token, 0, channel] = 15.0
    data = get_codec(name).encode(x, plane)
    codes = data[: channels * length * (8 if name == "int8" else 4) // 8]
    assert codes[byte] == (low if name == "int8" else low | high << 4)
    codes[byte] = 0x80 if name == "int8" else 0x88
    assert (codes == codes[byte]).all()


EXTREMES = {
    "zeros": lambda x: x * 0,
    "negative zeros": lambda x: x * -0.0,
    "constant": lambda x: x * 0 + np.float32(0.1),
    "negative constant": lambda x: x * 0 - np.float32(123.456),
    "denormal": lambda x: x * np.float32(1e-42),
    "tiny": lambda x: x * np.float32(1e-9),
    "f16 limits": lambda x: np.where(x > 0, np.float32(65504), np.float32(-65504)),
    "one huge outlier": lambda x: np.where(x == x.max(), np.float32(30000), x),
}


@codecs
@roles
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_extremes(codec: Codec, role: Role, kind: str, page_size: int) -> None:
    plane = Plane(role, page_size, 3, 64)
    x = EXTREMES[kind](sample(plane)).astype(np.float32)
    if kind == "f16 limits" and codec.rotates(plane):
        x /= 8  # 64 equal values add up to 8 times as much in one rotated channel
    y = codec.decode(codec.encode(x, plane), plane)
    assert np.isfinite(y).all()
    if codec.name == "f32":
        assert np.array_equal(x.view(np.uint32), y.view(np.uint32))
    elif codec.name in ("f16", "bf16"):
        assert (np.abs(y - x) <= np.maximum(2**-8 * np.abs(x), 2.0**-25)).all()
    else:
        reach = step(codec, x, plane)
        error = np.abs(stored_basis(codec, y - x, plane))
        peak = np.abs(stored_basis(codec, x, plane)).max()
        assert (error <= 0.51 * reach + 2**-10 * peak + 2.0**-24).all()
    if kind in ("zeros", "negative zeros"):
        assert not y.any()


@codecs
@roles
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_a_number_is_refused_by_name(codec: Codec, role: Role, bad: float) -> None:
    plane = Plane(role, 16, 5, 64)
    x = sample(plane)
    x[7, 3, 11] = bad
    with pytest.raises(CodecRangeError, match=rf"{codec.name} .*{role} of head 3"):
        codec.encode(x, plane)


@pytest.mark.parametrize(
    ("name", "value"),
    [("f16", 65520.0), ("bf16", 3.4e38), ("int8", -65600.0), ("int8", 1.7e7), ("int4", -65600.0), ("int4", 9.9e5)],
)
def test_overflow_is_refused_by_name(name: str, value: float) -> None:
    plane = Plane(Role.KEY, 32, 3, 64)
    x = sample(plane)
    x[0, 2, 5] = value
    with pytest.raises(CodecRangeError, match=rf"{name} .*key of head 2"):
        get_codec(name).encode(x, plane)


@pytest.mark.parametrize(("name", "value"), [("f16", 65519.0), ("bf16", 3.38e38), ("int8", 1.66e7), ("int4", 9.8e5)])
def test_just_inside_the_range_is_kept(name: str, value: float) -> None:
    plane = Plane(Role.KEY, 32, 3, 64)
    x = sample(plane)
    x[0, 2, 5] = value
    y = get_codec(name).decode(get_codec(name).encode(x, plane), plane)
    assert y[0, 2, 5] == pytest.approx(value, rel=0.01)


def test_rotation_overflow_is_refused() -> None:
    plane = Plane(Role.VALUE, 32, 1, 64)
    with pytest.raises(CodecRangeError, match="rotated"):
        get_codec("int4").encode(np.full((32, 1, 64), 3e38, np.float32), plane)


@quantized
@roles
@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, np.inf, np.nan])
def test_a_bad_stored_scale_is_refused(codec: Codec, role: Role, bad: float) -> None:
    plane = Plane(role, 32, 3, 64)
    data = codec.encode(sample(plane), plane)
    n_codes = plane.n_values if codec.name == "int8" else plane.n_values // 2
    scales = data[n_codes:].view(np.float16)
    scales[5] = bad
    with pytest.raises(CodecRangeError, match=rf"{codec.name} .*scale"):
        codec.decode(data, plane)


@quantized
@roles
def test_every_stored_scale_is_positive(codec: Codec, role: Role) -> None:
    plane = Plane(role, 32, 1, 64)
    for kind in EXTREMES:
        x = EXTREMES[kind](sample(plane)).astype(np.float32) / 8
        data = codec.encode(x, plane)
        n_codes = plane.n_values if codec.name == "int8" else plane.n_values // 2
        n_scales = 64 if role is Role.KEY else plane.page_size
        scales = data[n_codes : n_codes + 2 * n_scales].view(np.float16)
        assert scales.size == n_scales
        assert (scales > 0).all()
        assert np.isfinite(scales).all()


@quantized
def test_a_large_channel_bias_survives(codec: Codec) -> None:
    """Qwen2's biased key channels are hundreds of times the rest: a per-channel minimum absorbs them, and the other
    channels are kept as without."""
    plane = Plane(Role.KEY, 32, 2, 64, rotate=False)
    x = np.random.default_rng(1).standard_normal((32, 2, 64)).astype(np.float32)
    biased = x.copy()
    biased[:, :, 40] += 150
    error = codec.decode(codec.encode(biased, plane), plane) - biased
    without = codec.decode(codec.encode(x, plane), plane) - x
    assert np.array_equal(np.delete(error, 40, axis=2), np.delete(without, 40, axis=2))
    # The minimum's float16 steps are 1/8 there, and the scale covers what rounding it down adds to the range.
    assert np.abs(error[:, :, 40]).max() < {"int8": 0.02, "int4": 0.3}[codec.name]


@codecs
def test_wrong_shapes_and_sizes(codec: Codec) -> None:
    plane = Plane(Role.KEY, 16, 2, 64)
    with pytest.raises(ValueError, match="16, 2, 64"):
        codec.encode(np.zeros((16, 2, 32), np.float32), plane)
    with pytest.raises(ValueError, match="uint8"):
        codec.decode(np.zeros(3, np.uint8), plane)


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 8, 40])
def test_hadamard_is_orthonormal(head_dim: int) -> None:
    matrix = hadamard(np.eye(head_dim, dtype=np.float32)).astype(np.float64)
    assert np.allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)
    assert np.allclose(matrix, matrix.T)
    n = block_size(head_dim)
    blocks = np.kron(np.eye(head_dim // n), np.ones((n, n)))
    assert np.array_equal(matrix != 0, blocks != 0)


@given(st.integers(0, 2**32 - 1), st.sampled_from(HEAD_DIMS))
def test_hadamard_is_its_own_inverse(seed: int, head_dim: int) -> None:
    x = np.random.default_rng(seed).standard_normal((3, head_dim)).astype(np.float32)
    assert np.allclose(hadamard(hadamard(x)), x, atol=1e-5)


def test_rotation_flag_of_keys() -> None:
    """Rotating spreads an outlier channel of a token; where it is off, the stored codes are those of the
    plain values."""
    x = sample(Plane(Role.KEY, 32, 1, 64))
    codec = get_codec("int4")
    plain, rotated = Plane(Role.KEY, 32, 1, 64, rotate=False), Plane(Role.KEY, 32, 1, 64, rotate=True)
    assert not codec.rotates(plain)
    assert codec.rotates(rotated)
    assert codec.rotates(Plane(Role.VALUE, 32, 1, 64))
    assert np.array_equal(codec.encode(hadamard(x), plain), codec.encode(x, rotated))


@pytest.mark.parametrize(
    ("head_dim", "channel", "byte", "nibble"),
    [(40, 31, 30, 1), (40, 33, 32 + 2, 0), (40, 37, 32 + 2, 1), (56, 50, 48 + 4, 0), (56, 54, 48 + 4, 1), (8, 7, 6, 1)],
)
def test_packing_of_int4_values_with_a_shorter_run(head_dim: int, channel: int, byte: int, nibble: int) -> None:
    """Two tokens of head_dim 40 fill two runs of 32 codes and one of 16, of 8 bytes."""
    plane = Plane(Role.VALUE, 16, 1, head_dim)
    x = np.zeros((16, 1, head_dim), np.float32)
    x[2, 0, channel] = 15.0
    data = get_codec("int4").encode(hadamard(x), plane)
    assert data[head_dim + byte] >> 4 * nibble & 15 == 7
    data[head_dim + byte] ^= 15 << 4 * nibble
    assert (data[: 8 * head_dim] == 0x88).all()


def test_int4_refuses_odd_head_dims() -> None:
    with pytest.raises(ConfigError, match="multiple of 8, got 60"):
        get_codec("int4").bytes_per_page(Plane(Role.VALUE, 32, 1, 60))


def test_unknown_codec_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="f32, f16, bf16, int8, int4"):
        get_codec("int5")


def test_kernel_ids_are_distinct_and_fixed() -> None:
    assert [get_codec(n).kernel_id for n in ("f32", "f16", "bf16", "int8", "int4")] == [0, 1, 2, 3, 4]


@codecs
@roles
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 40), (32, 64), (128, 80)])
def test_a_head_is_a_plane_of_its_own(codec: Codec, role: Role, page_size: int, head_dim: int) -> None:
    plane = Plane(role, page_size, 3, head_dim, rotate=True)
    x = sample(plane)
    data = codec.encode(x, plane)
    where = codec.head_bytes(plane)
    assert np.array_equal(np.sort(where, axis=None), np.arange(data.size))
    for head in range(3):
        alone = np.ascontiguousarray(x[:, head : head + 1])
        assert np.array_equal(data[where[head]], codec.encode(alone, plane.head(head)))
    alone[0, 0, 0] = np.nan
    with pytest.raises(CodecRangeError, match=f"{role} of head 2: a value is NaN"):
        codec.encode(alone, plane.head(2))


@codecs
@roles
@pytest.mark.parametrize("n_tokens", [1, 7, 31, 32])
def test_slots_without_a_token_are_not_read(codec: Codec, role: Role, n_tokens: int) -> None:
    plane = Plane(role, 32, 2, 64, rotate=True)
    data = codec.encode(sample(plane), plane)
    whole = codec.decode(data, plane)
    if role is Role.VALUE and codec.name in ("int8", "int4"):
        n_codes = data.size - 4 * 2 * 32
        data[n_codes:].view(np.uint16).reshape(2, 2, 1, 32)[..., n_tokens:] = 0xFFFF
    assert np.array_equal(codec.decode(data, plane, n_tokens), whole[:n_tokens])
