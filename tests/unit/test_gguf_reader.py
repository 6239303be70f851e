"""The GGUF reader: what it reads, and that nothing damaged gets through."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import LoadError, UnsupportedError
from octavo.models.loading.gguf import LAYOUTS, StringArray, open_gguf


def write(path: Path, values: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, tuple):
            writer.add_key_value(key, value[0], *value[1:])
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def raw(*entries: bytes, tensors: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    head = magic + struct.pack("<IQQ", version, tensors, len(entries) - tensors)
    return head + b"".join(entries) + b"\0" * 64


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def strings(key: str, items: list[str]) -> bytes:
    body = b"".join(text(item.encode()) for item in items)
    return text(key.encode()) + struct.pack("<IIQ", 9, 8, len(items)) + body


def put(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return path


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    kinds = gguf.GGUFValueType
    values = {
        "u8": (200, kinds.UINT8),
        "i8": (-100, kinds.INT8),
        "u16": (60000, kinds.UINT16),
        "i16": (-30000, kinds.INT16),
        "u32": (4_000_000_000, kinds.UINT32),
        "i32": (-2_000_000_000, kinds.INT32),
        "u64": (1 << 63, kinds.UINT64),
        "i64": (-(1 << 62), kinds.INT64),
        "f32": (1.5, kinds.FLOAT32),
        "f64": (1e300, kinds.FLOAT64),
        "yes": (True, kinds.BOOL),
        "no": (False, kinds.BOOL),
        "text": "über 日本",
        "numbers": [1, 2, 3],
        "floats": [0.5, -0.25],
        "words": ["a", "", "日本", "x" * 300, "two words"],
    }
    tensors = {
        "one": np.arange(6, dtype=np.float32).reshape(2, 3),
        "two": np.arange(8, dtype=np.float16).reshape(2, 2, 2),
    }
    return write(tmp_path / "sample.gguf", values, tensors)


def test_reads_all_kinds_of_metadata(sample: Path) -> None:
    got = open_gguf(sample).metadata
    expected = {
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "u64": 1 << 63,
        "i64": -(1 << 62),
        "f32": 1.5,
        "f64": 1e300,
        "yes": True,
        "no": False,
        "text": "über 日本",
    }
    assert {key: got[key] for key in expected} == expected
    assert isinstance(got["yes"], bool)
    assert got["numbers"].tolist() == [1, 2, 3]
    assert got["floats"].tolist() == [0.5, -0.25]
    assert list(got["words"]) == ["a", "", "日本", "x" * 300, "two words"]


def test_places_tensors(sample: Path) -> None:
    file = open_gguf(sample)
    assert file.tensors["one"].shape == (3, 2)
    assert file.tensors["two"].shape == (2, 2, 2)
    assert file.tensor_bytes("one").view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert file.tensor_bytes("two").view(np.float16).tolist() == list(range(8))
    assert not file.tensor_bytes("one").flags.writeable


def test_every_truncation_is_refused(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    end = max(t.start + t.n_bytes for t in open_gguf(sample).tensors.values())
    for length in range(end):
        with pytest.raises(LoadError):
            open_gguf(put(tmp_path, data[:length]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_gives_a_load_error_or_a_readable_file(sample: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(sample.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(LoadError):
        file = open_gguf(put(tmp_path, bytes(content)))
        for value in file.metadata.values():
            if isinstance(value, StringArray):
                value.to_list()
        for name in file.tensors:
            file.tensor_bytes(name)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are less than a header"),
        (b"GGUF", "4 bytes are less than a header"),
        (raw(magic=b"GGML"), "not a GGUF file"),
        (b"PK\x03\x04" + b"\0" * 60, "not a GGUF file"),
        (raw(version=1), "GGUF version 1"),
        (raw(version=4), "GGUF version 4"),
        (raw(version=3 << 24), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "claims 1152921504606846976 metadata entries"),
        (raw(struct.pack("<Q", 1 << 62)), "needs 4611686018427387904 bytes"),
        (raw(text(b"k") + struct.pack("<I", 99)), "unknown value type 99"),
        (raw(text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61)), "array 'k'"),
        (raw(text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 58)), "array 'k'"),
        (raw(text(b"k") + struct.pack("<IIQ", 9, 77, 1)), "unknown value type 77"),
        (raw(text(b"k") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 9), "nested more than"),
        (raw(text(b"\xff\xfe") + struct.pack("<IB", 0, 1)), "not UTF-8"),
        (raw(*[text(b"k") + struct.pack("<IB", 0, 1)] * 2), "occurs twice"),
        (raw(text(b"general.alignment") + struct.pack("<II", 4, 12)), "general.alignment"),
        (raw(text(b"t") + struct.pack("<IQIQ", 9, 1, 0, 0), tensors=1), "9 dimensions"),
        (raw(text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0), tensors=1), "is empty"),
        (raw(text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 7), tensors=1), "not a multiple of 32"),
        (
            raw(text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 1 << 40), tensors=1),
            "tensor 't' (F32, shape (4,)) ends",
        ),
        (raw(text(b"t") + struct.pack("<IQIQ", 1, 1 << 50, 0, 0), tensors=1), "truncated: tensor 't'"),
        (raw(text(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0), tensors=1), "blocks of 32"),
        (raw(*[text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)] * 2, tensors=2), "occurs twice"),
        (
            raw(*[text(n) + struct.pack("<IQIQ", 1, 4, 0, 0) for n in (b"s", b"t")], tensors=2),
            "overlap",
        ),
    ],
)
def test_refuses_and_says_why(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(LoadError) as caught:
        open_gguf(put(tmp_path, data))
    assert message in str(caught.value)
    assert "x.gguf" in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="No such file"):
        open_gguf(tmp_path / "none.gguf")


def test_other_tensor_types_are_named(tmp_path: Path) -> None:
    entry = text(b"blk.0.ffn_up.weight") + struct.pack("<IQIQ", 1, 32, 39, 0)
    file = open_gguf(put(tmp_path, raw(entry, tensors=1)))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_up\.weight has type MXFP4"):
        file.tensor_bytes("blk.0.ffn_up.weight")
    entry = text(b"w") + struct.pack("<IQIQ", 1, 32, 999, 0)
    file = open_gguf(put(tmp_path, raw(entry, tensors=1)))
    with pytest.raises(UnsupportedError, match=r"w has type number 999 \(unknown\)"):
        file.tensor_bytes("w")


def test_block_sizes_are_ggmls() -> None:
    for name, layout in LAYOUTS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (layout.elements, layout.bytes)


# String arrays take a fast way that must give what the slow one gives.

awkward = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["", "\0", "\0" * 7, "\0" * 9, "x", "a" * 255, "b" * 256, "c" * 257, "d" * 70000, "\x01" + "\0" * 8]
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(awkward, max_size=12), after=st.lists(awkward, max_size=3))
def test_string_arrays(tmp_path: Path, items: list[str], after: list[str]) -> None:
    file = open_gguf(put(tmp_path, raw(strings("a", items), strings("b", after))))
    assert list(file.metadata["a"]) == items
    assert list(file.metadata["b"]) == after
    assert len(file.metadata["a"]) == len(items)


def test_string_arrays_longer_than_a_first_guess(tmp_path: Path) -> None:
    items = ["w" * (1 + i % 200) for i in range(3000)]
    file = open_gguf(put(tmp_path, raw(strings("a", items))))
    assert file.metadata["a"].to_list() == items
    assert file.metadata["a"][-1] == items[-1]


def test_a_string_that_is_not_utf8_shows_when_read(tmp_path: Path) -> None:
    body = text(b"k") + struct.pack("<IIQ", 9, 8, 2) + text(b"ok") + text(b"\xff\xff")
    value = open_gguf(put(tmp_path, raw(body))).metadata["k"]
    with pytest.raises(LoadError, match=r"x\.gguf: 'k': a string is not UTF-8"):
        value.to_list()


def test_real_vocabularies(smollm2: Path, qwen_coder: Path) -> None:
    for path, size in ((smollm2, 49152), (qwen_coder, 151936)):
        tokens = open_gguf(path).metadata["tokenizer.ggml.tokens"]
        merges = open_gguf(path).metadata["tokenizer.ggml.merges"]
        assert len(tokens.to_list()) == size
        assert tokens.to_list() == tokens._decode_each()
        assert merges.to_list() == merges._decode_each()
