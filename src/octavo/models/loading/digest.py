"""Content hashes of weight files, remembered beside them so that a start does not read them again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from octavo.errors import LoadError
from octavo.models.loading.safetensors import weight_files


def hash_file(path: Path) -> str:
    """SHA-256 of a file, as hex.

    Kept in FILE.sha256 as "hash size mtime_ns" and trusted while size and time of change are the file's.
    Where the folder cannot be written, every call hashes.
    """
    stat = path.stat()
    sidecar = sidecar_of(path)
    with contextlib.suppress(OSError, ValueError):
        digest, size, changed = sidecar.read_text(encoding="ascii").split()
        if (int(size), int(changed)) == (stat.st_size, stat.st_mtime_ns) and len(digest) == 64:
            return digest
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    remember_hash(path, digest)
    return digest


def remember_hash(path: Path, digest: str) -> None:
    """Write the sidecar, where the folder lets us."""
    with contextlib.suppress(OSError):
        stat = path.stat()
        write_atomically(sidecar_of(path), f"{digest} {stat.st_size} {stat.st_mtime_ns}\n")


def sidecar_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old content or the new one, also after a crash. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(handle, 0o644)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def hash_directory(directory: Path) -> str:
    """What identifies a Hugging Face model: its config.json and the hashes of its weight files."""
    digest = hashlib.sha256()
    for path in weight_files(directory):
        digest.update(f"{path.name} {hash_file(path)}\n".encode())
    digest.update((directory / "config.json").read_bytes())
    return digest.hexdigest()
