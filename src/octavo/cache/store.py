"""Where page bytes live. The cache decides which page lies where; a backend's store holds and copies the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ExportedPage:
    """A page's bytes outside the store, as they were when it was exported, and their checksum (16 bytes)."""

    data: bytes
    checksum: bytes


class PageStore(Protocol):
    """One run of memory of a backend: of the host, of a device. Offsets and sizes are in bytes from its start.

    New memory is zero. Nothing but the backend's own kernels and these operations touches it. One thread.
    """

    @property
    def n_bytes(self) -> int: ...

    def copy_page(self, source: int, target: int, n_bytes: int) -> None:
        """Copy between two places that do not overlap."""
        ...

    def zero(self, offset: int, n_bytes: int) -> None: ...

    def export_page(self, offset: int, n_bytes: int) -> ExportedPage: ...

    def import_page(self, offset: int, page: ExportedPage) -> None:
        """Write an exported page. Raises IntegrityError, with nothing written, where its bytes are not those that were
        exported."""
        ...

    def close(self) -> None:
        """Give the memory back. Nothing may be asked of the store afterwards."""
        ...
