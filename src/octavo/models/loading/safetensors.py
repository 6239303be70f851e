"""A memory-mapped reader of safetensors files, one or several with an index.

Layout: u64 header bytes | JSON header {name: {dtype, shape, data_offsets: [begin, end]}} | data, offsets
    counted from its start. The safetensors package hands out copies, and has no numpy type for BF16, so the
    file is mapped here and its tensors are views of it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import LoadError, UnsupportedError

#: What Octavo reads, and bytes per value.
DTYPES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file; `data` is its bytes as they lie in the file, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a model's weights, in a fixed order. Raises LoadError."""
    index = directory / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise LoadError(f"{index}: no weight_map from tensor names to files")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise LoadError(f"{index}: {name!r} is not the name of a file beside it")
            if not (directory / name).is_file():
                raise LoadError(f"{index}: {name} is missing; fetch the model again")
        return [directory / name for name in names]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if any(directory.glob("pytorch_model*.bin")) or any(directory.glob("*.pth")):
        raise LoadError(
            f"{directory}: its weights are torch files (.bin, .pth), which can run code when loaded; "
            f"Octavo reads safetensors: convert it (transformers' save_pretrained writes them)"
        )
    raise LoadError(f"{directory}: no {SINGLE} and no {INDEX}")


def read_json(path: Path) -> dict[str, Any]:
    """Raises LoadError where the file is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: not a JSON object")
    return value


def open_tensors(paths: list[Path]) -> dict[str, StoredTensor]:
    """All tensors of the files, mapped. Raises LoadError for damage, UnsupportedError for other types."""
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for tensor in _open_one(path):
            if tensor.name in tensors:
                raise LoadError(f"{path}: tensor {tensor.name} is also in another file of this model")
            tensors[tensor.name] = tensor
    return tensors


def _open_one(path: Path) -> list[StoredTensor]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise LoadError(f"{path}: {size} bytes are less than a header; fetch the file again")
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    header_bytes = int(data[:8].view("<u8")[0])
    if header_bytes > MAX_HEADER_BYTES:
        raise LoadError(f"{path}: not a safetensors file: a header of {header_bytes} bytes")
    if 8 + header_bytes > size:
        raise LoadError(f"{path}: truncated: a header of {header_bytes} bytes in a file of {size}; fetch it again")
    try:
        header = json.loads(data[8 : 8 + header_bytes].tobytes())
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise LoadError(f"{path}: not a safetensors file: its header is not a JSON object")
    body = data[8 + header_bytes :]
    return [_tensor(path, name, entry, body) for name, entry in header.items() if name != "__metadata__"]


def _tensor(path: Path, name: str, entry: Any, body: NDArray[np.uint8]) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sane = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{path}: tensor {name}: a damaged header entry") from error
    if not sane or begin > end:
        raise LoadError(f"{path}: tensor {name}: a damaged header entry (shape {shape}, bytes {begin} to {end})")
    if dtype not in DTYPES:
        raise UnsupportedError(f"{path}: tensor {name} has type {dtype}; Octavo reads {', '.join(DTYPES)}")
    if end - begin != prod(shape) * DTYPES[dtype]:
        raise LoadError(f"{path}: tensor {name}: {end - begin} bytes do not hold {dtype} of shape {shape}")
    if end > body.size:
        raise LoadError(
            f"{path}: truncated: tensor {name} ends at byte {end} of the data, {body.size} are there; "
            f"fetch the file again"
        )
    data = body[begin:end]
    if data.size and data.ctypes.data % DTYPES[dtype] != 0:
        # Old writers did not pad the header; backends may read whole words.
        data = data.copy()
        data.flags.writeable = False
    return StoredTensor(name, dtype, shape, data)
