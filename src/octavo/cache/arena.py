"""The arena: one run of memory, cut into frames that each serve one page class until they are empty again."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.errors import OutOfPages

#: Names a page for as long as it is allocated; the bytes behind it may move between steps.
PageHandle = int
#: Index of a page class (a page format) in the arena.
PageClass = int


@dataclass(slots=True)
class _Frame:
    page_class: PageClass
    slots: list[PageHandle | None]
    n_used: int = 0


@dataclass(frozen=True, slots=True)
class ClassUsage:
    """Pages of one class. `free` counts slots in the class's frames; unassigned frames are apart."""

    frames: int
    used: int
    free: int
    #: Bytes at the ends of its frames that no page fits into.
    frame_slack_bytes: int


@dataclass(slots=True)
class _Class:
    page_bytes: int
    per_frame: int
    frames: set[int] = field(default_factory=set)
    partial: set[int] = field(default_factory=set)
    n_used: int = 0


class Arena:
    """Allocates pages of a few fixed sizes out of a hard budget.

    Rules:
    - A handle is valid from `allocate` to `free`. Its offset is valid until the next `allocate`, `free` or `compact`:
      resolve offsets (`offsets[handle]`) when a step is built, keep none.
    - The bytes of a new page are arbitrary.
    - One thread.
    """

    def __init__(self, n_frames: int, frame_bytes: int, class_bytes: Sequence[int]) -> None:
        if any(b > frame_bytes for b in class_bytes):
            raise ValueError(f"frames of {frame_bytes} bytes cannot hold pages of {max(class_bytes)} bytes")
        self.frame_bytes = frame_bytes
        self.n_frames = n_frames
        mapped = mmap.mmap(-1, n_frames * frame_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        #: uint8 [n_frames * frame_bytes]. The system provides it as it is first written.
        self.memory: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)
        self._classes = [_Class(b, frame_bytes // b) for b in class_bytes]
        self._frames: dict[int, _Frame] = {}
        self._free_frames = list(range(n_frames - 1, -1, -1))
        max_pages = n_frames * max(c.per_frame for c in self._classes)
        #: int64 [handles]: byte offset of each live page in `memory`; -1 for dead handles.
        self.offsets: NDArray[np.int64] = np.full(max_pages, -1, dtype=np.int64)
        self._where: list[tuple[int, int] | None] = [None] * max_pages
        self._free_handles = list(range(max_pages - 1, -1, -1))

    @property
    def free_frames(self) -> int:
        return len(self._free_frames)

    def per_frame(self, page_class: PageClass) -> int:
        return self._classes[page_class].per_frame

    def allocate(self, page_class: PageClass) -> PageHandle:
        """A page of this class. Raises OutOfPages when its frames are full and no frame is free."""
        cls = self._classes[page_class]
        if cls.partial:
            # The fullest frame first, so that the others can run empty.
            index = max(cls.partial, key=lambda i: (self._frames[i].n_used, -i))
        elif self._free_frames:
            index = self._free_frames.pop()
            self._frames[index] = _Frame(page_class, [None] * cls.per_frame)
            cls.frames.add(index)
            cls.partial.add(index)
        else:
            raise OutOfPages(f"no free page of class {page_class} and no free frame")
        handle = self._free_handles.pop()
        self._place(handle, index)
        return handle

    def free(self, handle: PageHandle) -> None:
        self._remove(handle)
        self.offsets[handle] = -1
        self._where[handle] = None
        self._free_handles.append(handle)

    def compact(self) -> bool:
        """Empty one frame by moving its pages into other frames of its class; False when no class has the room."""
        for cls in self._classes:
            if len(cls.partial) < 2:
                continue
            index = min(cls.partial, key=lambda i: (self._frames[i].n_used, i))
            frame = self._frames[index]
            room = len(cls.frames) * cls.per_frame - cls.n_used - (cls.per_frame - frame.n_used)
            if room < frame.n_used:
                continue
            cls.partial.discard(index)
            for handle in [h for h in frame.slots if h is not None]:
                source = self.view(handle).copy()
                target = max(cls.partial, key=lambda i: (self._frames[i].n_used, -i))
                self._remove(handle)
                cls.partial.discard(index)
                self._place(handle, target)
                self.view(handle)[:] = source
            return True
        return False

    def view(self, handle: PageHandle) -> NDArray[np.uint8]:
        """uint8 [page_bytes], the page's bytes, writable."""
        where = self._where[handle]
        if where is None:
            raise ValueError(f"page handle {handle} is not allocated")
        offset = int(self.offsets[handle])
        return self.memory[offset : offset + self._classes[self._frames[where[0]].page_class].page_bytes]

    def usage(self, page_class: PageClass) -> ClassUsage:
        cls = self._classes[page_class]
        slack = self.frame_bytes - cls.per_frame * cls.page_bytes
        return ClassUsage(
            len(cls.frames), cls.n_used, len(cls.frames) * cls.per_frame - cls.n_used, len(cls.frames) * slack
        )

    def layout(self) -> list[tuple[PageClass, list[PageHandle | None]] | None]:
        """Per frame: its class and the page in each slot; None for a free frame."""
        result: list[tuple[PageClass, list[PageHandle | None]] | None] = []
        for i in range(self.n_frames):
            frame = self._frames.get(i)
            result.append((frame.page_class, list(frame.slots)) if frame else None)
        return result

    def close(self) -> None:
        """Give the memory back. No view of it may be used afterwards."""
        self.memory = np.empty(0, dtype=np.uint8)

    def _place(self, handle: PageHandle, index: int) -> None:
        frame = self._frames[index]
        cls = self._classes[frame.page_class]
        slot = frame.slots.index(None)
        frame.slots[slot] = handle
        frame.n_used += 1
        cls.n_used += 1
        if frame.n_used == cls.per_frame:
            cls.partial.discard(index)
        self._where[handle] = (index, slot)
        self.offsets[handle] = index * self.frame_bytes + slot * cls.page_bytes

    def _remove(self, handle: PageHandle) -> None:
        where = self._where[handle]
        if where is None:
            raise ValueError(f"page handle {handle} is not allocated")
        index, slot = where
        frame = self._frames[index]
        cls = self._classes[frame.page_class]
        frame.slots[slot] = None
        frame.n_used -= 1
        cls.n_used -= 1
        cls.partial.add(index)
        if frame.n_used == 0:
            cls.frames.discard(index)
            cls.partial.discard(index)
            del self._frames[index]
            self._free_frames.append(index)
