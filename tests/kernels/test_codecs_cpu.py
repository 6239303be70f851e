"""The C++ codecs write and read the same bytes as their numpy definition, on every instruction-set path."""

from __future__ import annotations

import numpy as np
import octavo.ops._cpu as _cpu
import pytest

from octavo.codecs.base import F32, U8, Codec, Plane, Role
from octavo.codecs.registry import codec_names, get_codec
from octavo.codecs.rotation import hadamard
from octavo.errors import CodecRangeError

ISAS = [isa for isa in ("portable", "avx2", "avx512") if _cpu.have_isa(isa)]
codecs = pytest.mark.parametrize("codec", [get_codec(n) for n in codec_names()], ids=codec_names())
roles = pytest.mark.parametrize("role", list(Role))


@pytest.fixture(scope="module", params=ISAS)
def context(request: pytest.FixtureRequest) -> _cpu.Context:
    return _cpu.Context(1, request.param)


def encode(context: _cpu.Context, codec: Codec, plane: Plane, x: F32) -> U8:
    data = np.full(codec.bytes_per_page(plane) + 128, 0xA5, np.uint8)
    inner = data[64:-64]
    _cpu.encode_plane(context, codec.kernel_id, plane.role is Role.KEY, codec.rotates(plane), x, inner)
    assert (data[:64] == 0xA5).all()
    assert (data[-64:] == 0xA5).all()
    return inner


def decode(context: _cpu.Context, codec: Codec, plane: Plane, data: U8) -> F32:
    x = np.empty((plane.page_size, plane.n_heads, plane.head_dim), np.float32)
    _cpu.decode_plane(context, codec.kernel_id, plane.role is Role.KEY, codec.rotates(plane), data, x)
    return x


def sample(plane: Plane, seed: int) -> F32:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((plane.page_size, plane.n_heads, plane.head_dim)).astype(np.float32)
    x *= np.exp2(rng.integers(-30, 8, x.shape[1:])).astype(np.float32)
    return x


def same_bits(a: F32, b: F32) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@codecs
@roles
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [8, 16, 40, 56, 64, 80, 96, 128, 256])
def test_same_bytes_as_numpy(context: _cpu.Context, codec: Codec, role: Role, page_size: int, head_dim: int) -> None:
    for n_heads in (1, 3, 5):
        for rotate in (False, True):
            plane = Plane(role, page_size, n_heads, head_dim, rotate)
            x = sample(plane, n_heads)
            expected = codec.encode(x, plane)
            assert np.array_equal(encode(context, codec, plane, x), expected)
            assert same_bits(decode(context, codec, plane, expected), codec.decode(expected, plane))


EXTREMES = {
    "zeros": lambda x: x * 0,
    "negative zeros": lambda x: x * -0.0,
    "signed zeros": lambda x: np.copysign(np.float32(0), x),
    "constant": lambda x: x * 0 + np.float32(0.1),
    "negative constant": lambda x: x * 0 - np.float32(123.456),
    "denormal": lambda x: np.sign(x) * np.float32(1e-42),
    "below the smallest float16": lambda x: np.sign(x) * np.float32(1e-9),
    "subnormal float16": lambda x: x / np.abs(x).max() * np.float32(3e-6),
    "f16 limits": lambda x: np.sign(x) * np.float32(8188),
    "one huge outlier": lambda x: np.where(x == x.max(), np.float32(30000), np.clip(x, -1, 1)),
    "ties": lambda x: np.round(x / np.abs(x).max() * 254) / 2,
}


@codecs
@roles
@pytest.mark.parametrize("kind", EXTREMES)
def test_extremes_give_the_same_bytes(context: _cpu.Context, codec: Codec, role: Role, kind: str) -> None:
    for page_size, head_dim in ((16, 64), (32, 80), (128, 8)):
        plane = Plane(role, page_size, 3, head_dim, rotate=True)
        x = EXTREMES[kind](sample(plane, 7)).astype(np.float32)
        expected = codec.encode(x, plane)
        assert np.array_equal(encode(context, codec, plane, x), expected)
        assert same_bits(decode(context, codec, plane, expected), codec.decode(expected, plane))


@codecs
def test_any_bytes_decode_the_same(context: _cpu.Context, codec: Codec) -> None:
    """Codes that no encoder writes included; scales as they are."""
    rng = np.random.default_rng(3)
    for role in Role:
        plane = Plane(role, 32, 2, 80, rotate=True)
        data = codec.encode(sample(plane, 1), plane)
        n_codes = {"int8": plane.n_values, "int4": plane.n_values // 2}.get(codec.name, data.size)
        data[:n_codes] = rng.integers(0, 256, n_codes)
        decoded = decode(context, codec, plane, data)
        assert np.array_equal(decoded, codec.decode(data, plane), equal_nan=True)


@codecs
@roles
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_a_number_is_refused(context: _cpu.Context, codec: Codec, role: Role, bad: float) -> None:
    plane = Plane(role, 16, 3, 64, rotate=True)
    x = sample(plane, 0)
    x[15, 2, 63] = bad
    with pytest.raises(CodecRangeError, match=rf"{codec.name} .*{role} of head 2: .*NaN"):
        encode(context, codec, plane, x)


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("f16", 65519.0, True),
        ("f16", 65520.0, False),
        ("bf16", 3.38e38, True),
        ("bf16", -3.4e38, False),
        ("int8", -65500.0, True),
        ("int8", -65510.0, False),
        ("int8", 1.66e7, True),
        ("int8", 1.7e7, False),
        ("int4", -65500.0, True),
        ("int4", -65510.0, False),
        ("int4", 9.8e5, True),
        ("int4", 9.9e5, False),
    ],
)
def test_range_ends_where_numpy_ends_it(context: _cpu.Context, name: str, value: float, fits: bool) -> None:
    codec, plane = get_codec(name), Plane(Role.KEY, 32, 2, 64)
    x = np.clip(sample(plane, 0), -1, 1)
    x[3, 1, 5] = value
    if fits:
        assert np.array_equal(encode(context, codec, plane, x), codec.encode(x, plane))
    else:
        for run in (lambda: encode(context, codec, plane, x), lambda: codec.encode(x, plane)):
            with pytest.raises(CodecRangeError, match=rf"{name} .*key of head 1: .*range"):
                run()


def test_rotation_overflow_is_refused(context: _cpu.Context) -> None:
    plane = Plane(Role.VALUE, 32, 1, 64)
    with pytest.raises(CodecRangeError, match="rotated"):
        encode(context, get_codec("int4"), plane, np.full((32, 1, 64), 3e38, np.float32))


@pytest.mark.parametrize("name", ["int8", "int4"])
@roles
@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, np.inf, np.nan])
def test_a_bad_stored_scale_is_refused(context: _cpu.Context, name: str, role: Role, bad: float) -> None:
    codec, plane = get_codec(name), Plane(role, 32, 3, 64)
    data = codec.encode(sample(plane, 0), plane)
    n_codes = plane.n_values if name == "int8" else plane.n_values // 2
    n_scales = 64 if role is Role.KEY else 32
    data[n_codes:].view(np.float16)[n_scales] = bad
    with pytest.raises(CodecRangeError, match=rf"{name} .*{role} of head 1: a stored scale"):
        decode(context, codec, plane, data)


@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 96, 128, 256])
def test_hadamard_gives_the_same_bits(context: _cpu.Context, head_dim: int) -> None:
    """The f32 codec with the rotated flag shows the transform alone: keys by columns, values by rows."""
    for role in Role:
        plane = Plane(role, 16, 2, head_dim)
        x = sample(plane, 5)
        rotated = get_codec("f32").encode(hadamard(x), plane)
        data = np.empty_like(rotated)
        _cpu.encode_plane(context, 0, role is Role.KEY, True, x, data)
        assert np.array_equal(data, rotated)
        back = np.empty_like(x)
        _cpu.decode_plane(context, 0, role is Role.KEY, True, data, back)
        assert same_bits(back, hadamard(hadamard(x)))
