"""Pages in the host's memory: what the cpu and reference backends read and write."""

from __future__ import annotations

import hashlib
import mmap

import numpy as np
from numpy.typing import NDArray

from octavo.cache.store import ExportedPage, PageStore
from octavo.errors import IntegrityError


class HostStore:
    """Implements `octavo.cache.store.PageStore` over anonymous memory, in huge pages where the system has them.

    Attributes:
        memory: uint8 [n_bytes]. The system provides it as it is first written. Only kernels take it.
    """

    def __init__(self, n_bytes: int) -> None:
        mapped = mmap.mmap(-1, n_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        # The array alone keeps it mapped.
        self.memory: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)

    @property
    def n_bytes(self) -> int:
        return len(self.memory)

    def copy_page(self, source: int, target: int, n_bytes: int) -> None:
        self.memory[target : target + n_bytes] = self.memory[source : source + n_bytes]

    def zero(self, offset: int, n_bytes: int) -> None:
        self.memory[offset : offset + n_bytes] = 0

    def export_page(self, offset: int, n_bytes: int) -> ExportedPage:
        data = self.memory[offset : offset + n_bytes].tobytes()
        return ExportedPage(data, _checksum(data))

    def import_page(self, offset: int, page: ExportedPage) -> None:
        if _checksum(page.data) != page.checksum:
            raise IntegrityError(f"a page of {len(page.data):,} bytes has changed since it was exported")
        self.memory[offset : offset + len(page.data)] = np.frombuffer(page.data, dtype=np.uint8)

    def close(self) -> None:
        self.memory = np.empty(0, dtype=np.uint8)


def host_memory(store: PageStore) -> NDArray[np.uint8]:
    """The memory of a store that a backend of the host has made. Raises TypeError for another's."""
    if not isinstance(store, HostStore):
        raise TypeError(f"a backend of the host reads a HostStore, got {type(store).__name__}")
    return store.memory


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
