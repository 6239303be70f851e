"""A memory-mapped reader of GGUF files, version 2 and 3 (the format is described in ggml's docs/gguf.md).

Layout, little endian throughout:

    magic "GGUF" | u32 version | u64 tensor_count | u64 kv_count
    kv_count   x { string key | u32 value type | value }
    tensor_count x { string name | u32 n_dims | u64 dims[n_dims] (fastest first) | u32 type | u64 offset }
    padding to `general.alignment` (32 if absent) | tensor data, offsets counted from here

    string: u64 bytes | UTF-8.   array: u32 element type | u64 count | elements.

Everything is checked against the file's size before it is believed, so a truncated or damaged file gives a
LoadError that says what is wrong and where, and never a huge allocation. String arrays, which hold whole
vocabularies, are decoded on first use.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError, UnsupportedError

MAGIC = b"GGUF"
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Tensors are stored in blocks along a row: `elements` values in `bytes` bytes."""

    elements: int
    bytes: int


#: The tensor types that Octavo reads.
LAYOUTS: Mapping[str, BlockLayout] = {
    "F32": BlockLayout(1, 4),
    "F16": BlockLayout(1, 2),
    "BF16": BlockLayout(1, 2),
    "Q4_0": BlockLayout(32, 18),
    "Q4_1": BlockLayout(32, 20),
    "Q5_0": BlockLayout(32, 22),
    "Q5_1": BlockLayout(32, 24),
    "Q8_0": BlockLayout(32, 34),
    "Q4_K": BlockLayout(256, 144),
    "Q5_K": BlockLayout(256, 176),
    "Q6_K": BlockLayout(256, 210),
}

#: ggml's type numbers; names that are not in LAYOUTS are known only so that messages can name them.
TYPE_NAMES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_STRING, _ARRAY = 8, 9
#: Value type -> (numpy dtype, struct format) of fixed-size values.
_SCALARS: Mapping[int, tuple[str, str]] = {
    0: ("<u1", "<B"), 1: ("<i1", "<b"), 2: ("<u2", "<H"), 3: ("<i2", "<h"), 4: ("<u4", "<I"),
    5: ("<i4", "<i"), 6: ("<f4", "<f"), 7: ("?", "<?"), 10: ("<u8", "<Q"),
    11: ("<i8", "<q"), 12: ("<f8", "<d"),
}  # fmt: skip

_U64 = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """A GGUF array of strings, decoded when first read. Raises LoadError then if it is not UTF-8."""

    def __init__(self, where: str, data: NDArray[np.uint8], count: int, headers: NDArray[np.int64] | None) -> None:
        self._where, self._data, self._count, self._headers = where, data, count, headers
        self._items: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.to_list()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def to_list(self) -> list[str]:
        if self._items is None:
            try:
                self._items = self._decode_joined() if self._headers is not None else self._decode_each()
            except UnicodeDecodeError as error:
                raise LoadError(f"{self._where}: a string is not UTF-8 ({error})") from error
        return self._items

    def _decode_joined(self) -> list[str]:
        """All strings in one decode, with the last of a length's eight bytes (a zero) as separator.

        Lengths are below the file's size, so their last byte is zero; strings that contain NUL show in the
        count.
        """
        headers = cast("NDArray[np.int64]", self._headers)
        keep = np.ones(self._data.size, dtype=bool)
        for i in range(7):
            keep[headers + i] = False
        parts = self._data[keep].tobytes().decode("utf-8").split("\0")
        return parts[1:] if len(parts) == self._count + 1 else self._decode_each()

    def _decode_each(self) -> list[str]:
        data, at, items = self._data.tobytes(), 0, []
        for _ in range(self._count):
            start = at + 8
            at = start + _U64.unpack_from(data, at)[0]
            items.append(data[start:at].decode("utf-8"))
        return items


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the tensor table.

    Attributes:
        dtype: ggml's type name, also of types that Octavo does not read.
        shape: as in the file, the contiguous dimension first.
        start: byte offset in the file.
        n_bytes: size of its data; 0 where the type is not one that Octavo reads.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file's metadata and tensor table, and its bytes, memory-mapped and read-only."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: NDArray[np.uint8] = field(repr=False)

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """uint8 view of a tensor's data. Raises UnsupportedError for a type that Octavo does not read."""
        tensor = self.tensors[name]
        if tensor.dtype not in LAYOUTS:
            raise UnsupportedError(
                f"{self.path}: tensor {name} has type {tensor.dtype}, which Octavo does not read; "
                f"it reads {', '.join(LAYOUTS)}"
            )
        return self.data[tensor.start : tensor.start + tensor.n_bytes]


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and read its metadata and tensor table. Raises LoadError or UnsupportedError."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise LoadError(f"{path}: not a GGUF file: {size} bytes are less than a header")
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    return _Reader(path, data).read()


class _Reader:
    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path, self.data, self.size = path, data, data.size
        self.view = data.data
        self.at = 0

    def error(self, what: str) -> LoadError:
        return LoadError(f"{self.path}: {what} (at byte {self.at} of {self.size})")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.error(
                f"truncated or damaged: {what} needs {count} bytes, {self.size - self.at} are left; "
                "fetch the file again"
            )

    def scalar(self, fmt: str, what: str) -> Any:
        width = struct.calcsize(fmt)
        self.need(width, what)
        (value,) = struct.unpack_from(fmt, self.view, self.at)
        self.at += width
        return value

    def string(self, what: str) -> str:
        length = self.scalar("<Q", f"the length of {what}")
        self.need(length, what)
        raw = bytes(self.view[self.at : self.at + length])
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error
        self.at += length
        return text

    def read(self) -> GgufFile:
        magic = bytes(self.view[:4])
        if magic != MAGIC:
            raise LoadError(f"{self.path}: not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
        self.at = 4
        version = self.scalar("<I", "the version")
        if version not in (2, 3):
            if version and version & 0xFFFF == 0:
                raise UnsupportedError(f"{self.path}: a big-endian GGUF file; Octavo reads little-endian ones")
            raise UnsupportedError(f"{self.path}: GGUF version {version}; Octavo reads versions 2 and 3")
        n_tensors, n_kv = self.scalar("<Q", "the tensor count"), self.scalar("<Q", "the metadata count")
        # The smallest possible entries: an empty key with a one-byte value, and an unnamed tensor of no
        # dimensions.
        for count, smallest, what in ((n_kv, 13, "metadata entries"), (n_tensors, 24, "tensors")):
            if count * smallest > self.size - self.at:
                raise self.error(f"truncated or damaged: its header claims {count} {what}, more than fit")

        metadata: dict[str, Any] = {}
        for i in range(n_kv):
            key = self.string(f"the key of metadata entry {i}")
            if key in metadata:
                raise self.error(f"metadata key {key!r} occurs twice")
            metadata[key] = self.value(self.scalar("<I", f"the type of {key!r}"), key, depth=0)

        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8 != 0:
            raise self.error(f"general.alignment must be a multiple of 8, is {alignment!r}")
        entries = [self.tensor_entry(i) for i in range(n_tensors)]
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, type_id, shape, offset in entries:
            if name in tensors:
                raise self.error(f"tensor {name!r} occurs twice")
            if offset % alignment != 0:
                raise self.error(f"tensor {name!r} starts at offset {offset}, not a multiple of {alignment}")
            tensors[name] = self.place(name, type_id, shape, base + offset)
        self.check_overlaps(tensors)
        return GgufFile(self.path, version, metadata, tensors, self.data)

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind][1], f"the value of {key!r}")
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind != _ARRAY:
            raise self.error(f"metadata key {key!r} has unknown value type {kind}")
        if depth == MAX_ARRAY_DEPTH:
            raise self.error(f"metadata key {key!r}: arrays nested more than {MAX_ARRAY_DEPTH} deep")
        element = self.scalar("<I", f"the element type of {key!r}")
        count = self.scalar("<Q", f"the length of {key!r}")
        if element in _SCALARS:
            dtype = np.dtype(_SCALARS[element][0])
            self.need(count * dtype.itemsize, f"array {key!r} of {count} values")
            array = self.data[self.at : self.at + count * dtype.itemsize].view(dtype)
            self.at += array.nbytes
            return array
        if element == _STRING:
            return self.string_array(key, count)
        self.need(count * 12, f"array {key!r} of {count} arrays")
        return [self.value(element, key, depth + 1) for _ in range(count)]

    def string_array(self, key: str, count: int) -> StringArray:
        self.need(count * 8, f"array {key!r} of {count} strings")
        start = self.at
        headers = self.find_headers(count)
        if headers is not None:
            self.at = int(headers[-1])
            length = self.scalar("<Q", f"the length of the last string of {key!r}")
            self.at += length
        else:
            for i in range(count):
                length = self.scalar("<Q", f"the length of string {i} of {key!r}")
                self.need(length, f"string {i} of {key!r}")
                self.at += length
        relative = None if headers is None else headers - start
        return StringArray(f"{self.path}: {key!r}", self.data[start : self.at], count, relative)

    def find_headers(self, count: int) -> NDArray[np.int64] | None:
        """Byte offsets of the length fields of `count` strings from here on, without walking them one by one.

        A length below 256 is one byte and seven zeros, and text rarely holds seven zeros in a row. Such
        places are candidates. They are length fields if each one leads exactly to the next; where one does
        not, the strings between (longer ones) are walked. None where that does not work out either; then all
        strings are walked.
        """
        left = self.size - self.at
        window = 0
        while count > 0 and window < left:
            window = min(left, max(2 * window, 24 * count + 4096))
            text = self.data[self.at : self.at + window]
            zero = text == 0
            run = zero[:-1] & zero[1:]
            run = run[:-2] & run[2:]
            run = run[:-3] & run[3:]  # run[i]: bytes i .. i + 6 are all zero
            short = np.flatnonzero(~zero[: run.size - 1] & run[1:])[:count].astype(np.int64)
            ends = short + 8 + text[short]
            long: list[int] = []
            # A break before candidate i: what candidate i - 1 (or the start) leads to is not candidate i.
            before = np.concatenate(([0], ends[:-1]))
            for i in np.flatnonzero(before != short):
                at, stop = int(before[i]), int(short[i])
                while at < stop:
                    long.append(at)
                    at += 8 + _U64.unpack_from(text.data, at)[0]
                if at != stop:
                    return None
            headers = np.sort(np.concatenate((short, np.array(long, dtype=np.int64))))[:count]
            if headers.size == count:
                last = int(headers[-1])
                fits = last + 8 + _U64.unpack_from(text.data, last)[0] <= left
                return headers + self.at if fits else None
        return None

    def tensor_entry(self, index: int) -> tuple[str, int, tuple[int, ...], int]:
        name = self.string(f"the name of tensor {index}")
        n_dims = self.scalar("<I", f"the rank of tensor {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.error(f"tensor {name!r} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(self.scalar("<Q", f"the shape of tensor {name!r}") for _ in range(n_dims))
        if 0 in shape:
            raise self.error(f"tensor {name!r} is empty: shape {shape}")
        return (
            name,
            self.scalar("<I", f"the type of tensor {name!r}"),
            shape,
            self.scalar("<Q", f"the offset of tensor {name!r}"),
        )

    def place(self, name: str, type_id: int, shape: tuple[int, ...], start: int) -> GgufTensor:
        dtype = TYPE_NAMES.get(type_id, f"number {type_id} (unknown)")
        layout = LAYOUTS.get(dtype)
        n_bytes = 0
        if layout is not None:
            if shape[0] % layout.elements != 0:
                raise self.error(
                    f"tensor {name!r}: rows of {shape[0]} values cannot be {dtype} (blocks of {layout.elements})"
                )
            n_bytes = prod(shape) // layout.elements * layout.bytes
        if start + n_bytes > self.size:
            raise LoadError(
                f"{self.path}: truncated: tensor {name!r} ({dtype}, shape {shape}) ends at byte "
                f"{start + n_bytes}, the file has {self.size}; fetch the file again"
            )
        return GgufTensor(name, dtype, shape, start, n_bytes)

    def check_overlaps(self, tensors: Mapping[str, GgufTensor]) -> None:
        ordered = sorted(tensors.values(), key=lambda t: t.start)
        for one, other in pairwise(ordered):
            if one.start + one.n_bytes > other.start:
                raise self.error(f"damaged: tensors {one.name!r} and {other.name!r} overlap")
