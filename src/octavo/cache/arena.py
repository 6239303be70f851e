"""The arena: which page lies where. It keeps the books; the bytes are the store's.

Memory is cut into frames that each serve one page class until they are empty again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.cache.store import PageStore
from octavo.errors import OutOfPages

#: Names a page for as long as it is allocated; its bytes may move between steps.
PageHandle = int
I64 = NDArray[np.int64]


@dataclass(slots=True)
class _Frame:
    page_class: int
    #: Handle in each slot.
    slots: list[PageHandle | None]
    free_slots: list[int]
    #: Whether its free slots may hold old bytes.
    is_dirty: bool
    n_pinned: int = 0

    @property
    def n_used(self) -> int:
        return len(self.slots) - len(self.free_slots)


@dataclass(frozen=True, slots=True)
class ClassUsage:
    """Pages of one class. Each slot of the class's frames is one of active, cached, free.

    Attributes:
        active: held by a block table, or by whoever pinned it.
        cached: held by the prefix tree alone.
        free: slots in the class's frames; unassigned frames are apart.
        frame_slack_bytes: bytes at the ends of its frames that no page fits into.
    """

    frames: int
    active: int
    cached: int
    free: int
    frame_slack_bytes: int


class _Partial:
    """Frames of one class that have both pages and free slots, in order of how full they are."""

    def __init__(self, per_frame: int) -> None:
        self._by_use: list[dict[int, None]] = [{} for _ in range(per_frame)]
        #: Bit n is set while some frame holds n pages.
        self._mask = 0
        self.n = 0

    def add(self, frame: int, n_used: int) -> None:
        self._by_use[n_used][frame] = None
        self._mask |= 1 << n_used
        self.n += 1

    def remove(self, frame: int, n_used: int) -> None:
        del self._by_use[n_used][frame]
        if not self._by_use[n_used]:
            self._mask ^= 1 << n_used
        self.n -= 1

    def fullest(self) -> int | None:
        return next(iter(self._by_use[self._mask.bit_length() - 1])) if self._mask else None

    def from_emptiest(self) -> Iterator[int]:
        for frames in self._by_use:
            yield from frames


@dataclass(slots=True)
class _Class:
    page_bytes: int
    per_frame: int
    partial: _Partial
    n_frames: int = 0
    n_used: int = 0
    n_cached: int = 0


@dataclass(slots=True)
class OwnerUsage:
    """Bytes of pages that one owner has allocated: all, and those that only the prefix tree holds."""

    used: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class ArenaSnapshot:
    """Copies of the books at one moment; see `Arena` for the arrays. `frame_class` is -1 for a free frame."""

    frame_bytes: int
    class_bytes: tuple[int, ...]
    frame_class: NDArray[np.int16]
    offsets: I64
    ref_count: NDArray[np.int32]
    published: NDArray[np.bool_]


class Arena:
    """Allocates pages of a few fixed sizes out of a hard budget, and counts who holds them.

    Rules:
    - A page is held from `allocate` on; `hold` adds a holder, `release` takes one away, the last one frees it. Block
      tables, the prefix tree and whoever pins a page are holders.
    - A page's offset is valid until the next `allocate`, `release` or `compact`: resolve offsets (`offsets[handles]`)
      when a step is built, keep none. A pinned page does not move.
    - The bytes of a new page are zero: what stood there before may have been somebody else's, and is not to live on in
      the unused part of a page.
    - One thread.

    Attributes, all indexed by handle:
        offsets: int64, byte offset of each live page in the store; -1 for dead handles.
        page_class: int16, index of the page's class.
        ref_count: int32, holders.
        published: bool, whether the prefix tree is one of them.
        owner: int32, on whose account the page is (see `usage_of`).
    """

    def __init__(self, store: PageStore, n_frames: int, frame_bytes: int, class_bytes: Sequence[int]) -> None:
        if any(b > frame_bytes for b in class_bytes):
            raise ValueError(f"frames of {frame_bytes} bytes cannot hold pages of {max(class_bytes)} bytes")
        if store.n_bytes < n_frames * frame_bytes:
            raise ValueError(f"{n_frames} frames of {frame_bytes} bytes do not fit into {store.n_bytes} bytes")
        self.store = store
        self.frame_bytes = frame_bytes
        self.n_frames = n_frames
        self._classes = [_Class(b, frame_bytes // b, _Partial(frame_bytes // b)) for b in class_bytes]
        self._frames: dict[int, _Frame] = {}
        self._frame_class = np.full(n_frames, -1, dtype=np.int16)
        self._free_frames = list(range(n_frames - 1, -1, -1))
        max_pages = n_frames * max(c.per_frame for c in self._classes)
        self.offsets: I64 = np.full(max_pages, -1, dtype=np.int64)
        self.page_class: NDArray[np.int16] = np.full(max_pages, -1, dtype=np.int16)
        self.ref_count: NDArray[np.int32] = np.zeros(max_pages, dtype=np.int32)
        self.published: NDArray[np.bool_] = np.zeros(max_pages, dtype=np.bool_)
        self._free_handles = list(range(max_pages - 1, -1, -1))
        self._zero = np.zeros(max_pages, dtype=np.bool_)
        self.owner: NDArray[np.int32] = np.zeros(max_pages, dtype=np.int32)
        self._owners: list[OwnerUsage] = []
        #: Frames that have held pages: their free slots may hold old bytes.
        self._touched: set[int] = set()

    @property
    def free_frames(self) -> int:
        return len(self._free_frames)

    def new_owner(self) -> int:
        """An account that pages can be on."""
        self._owners.append(OwnerUsage())
        return len(self._owners) - 1

    def usage_of(self, owner: int) -> OwnerUsage:
        return self._owners[owner]

    def allocate(self, page_class: int, owner: int) -> PageHandle:
        """A page of this class, with one holder. Raises OutOfPages when its frames are full and no frame is free."""
        cls = self._classes[page_class]
        frame = cls.partial.fullest()  # so that the others can run empty
        if frame is None:
            if not self._free_frames:
                raise OutOfPages(f"no free page of class {page_class} and no free frame")
            frame = self._take_frame(page_class)
        handle = self._free_handles.pop()
        self._place(handle, page_class, frame)
        if self._frames[frame].is_dirty:
            self.store.zero(int(self.offsets[handle]), cls.page_bytes)
        self.page_class[handle] = page_class
        self.ref_count[handle] = 1
        self.owner[handle] = owner
        self._owners[owner].used += cls.page_bytes
        return handle

    def hold(self, handles: I64) -> None:
        """One more holder for each of these pages, which are live and distinct."""
        counts = self.ref_count[handles]
        self._add_cached(handles[self.published[handles] & (counts == 1)], -1)
        self.ref_count[handles] = counts + 1

    def release(self, handles: I64) -> None:
        """One holder less for each of these pages, which are distinct. Raises ValueError, with nothing changed, where
        one has none."""
        counts = self.ref_count[handles] - 1
        if (counts < 0).any():
            raise ValueError(f"page {int(handles[counts < 0][0])} released more often than held")
        self.ref_count[handles] = counts
        published = self.published[handles]
        self._add_cached(handles[published & (counts == 1)], 1)
        for handle in handles[counts == 0]:
            self._free(int(handle))

    def publish(self, handle: PageHandle) -> None:
        """The prefix tree becomes a holder, beside at least one other."""
        if self.ref_count[handle] < 1 or self.published[handle]:
            raise ValueError(f"page {handle} is not held, or is in the tree already")
        self.published[handle] = True
        self.ref_count[handle] += 1

    def unpublish(self, handle: PageHandle) -> None:
        """The prefix tree lets go."""
        if not self.published[handle]:
            raise ValueError(f"page {handle} is not in the tree")
        if self.ref_count[handle] == 1:
            self._add_cached(np.array([handle], dtype=np.int64), -1)
        self.published[handle] = False
        self.release(np.array([handle], dtype=np.int64))

    def page_bytes(self, handle: PageHandle) -> int:
        return self._classes[int(self.page_class[handle])].page_bytes

    def zero_when_freed(self, handles: I64) -> None:
        """The bytes of these pages do not outlive their last holder."""
        self._zero[handles] = True

    def scrub(self) -> int:
        """Zero all that holds no page now, where pages have been; how many bytes."""
        n_bytes = 0
        for index in sorted(self._touched):
            start = index * self.frame_bytes
            frame = self._frames.get(index)
            if frame is None:
                self.store.zero(start, self.frame_bytes)
                n_bytes += self.frame_bytes
                continue
            page_bytes = self._classes[frame.page_class].page_bytes
            for slot in frame.free_slots:
                self.store.zero(start + slot * page_bytes, page_bytes)
            frame.is_dirty = False
            end = len(frame.slots) * page_bytes
            self.store.zero(start + end, self.frame_bytes - end)
            n_bytes += len(frame.free_slots) * page_bytes + self.frame_bytes - end
        self._touched = set(self._frames)
        return n_bytes

    @contextmanager
    def pinned(self, handles: I64) -> Iterator[I64]:
        """Within, these pages neither move nor are freed, so that their offsets, which this gives, stay valid while
        someone copies them."""
        self.hold(handles)
        offsets = self.offsets[handles]
        frames = [self._frames[int(f)] for f in offsets // self.frame_bytes]
        for frame in frames:
            frame.n_pinned += 1
        try:
            yield offsets
        finally:
            for frame in frames:
                frame.n_pinned -= 1
            self.release(handles)

    def compact(self) -> bool:
        """Empty one frame by moving its pages into other frames of its class; False when no class has the room."""
        for index, cls in enumerate(self._classes):
            if cls.partial.n < 2:
                continue
            for frame_index in cls.partial.from_emptiest():
                frame = self._frames[frame_index]
                room = cls.n_frames * cls.per_frame - cls.n_used - len(frame.free_slots)
                if room < frame.n_used:
                    break  # fuller ones need more
                if frame.n_pinned == 0:
                    self._empty_frame(index, frame_index)
                    return True
        return False

    def usage(self, page_class: int) -> ClassUsage:
        cls = self._classes[page_class]
        slack = self.frame_bytes - cls.per_frame * cls.page_bytes
        free = cls.n_frames * cls.per_frame - cls.n_used
        return ClassUsage(cls.n_frames, cls.n_used - cls.n_cached, cls.n_cached, free, cls.n_frames * slack)

    def snapshot(self) -> ArenaSnapshot:
        """Copies of the books, in a time that hardly grows with their length."""
        return ArenaSnapshot(
            self.frame_bytes,
            tuple(c.page_bytes for c in self._classes),
            self._frame_class.copy(),
            self.offsets.copy(),
            self.ref_count.copy(),
            self.published.copy(),
        )

    def _take_frame(self, page_class: int) -> int:
        cls = self._classes[page_class]
        index = self._free_frames.pop()
        slots: list[PageHandle | None] = [None] * cls.per_frame
        self._frames[index] = _Frame(
            page_class, slots, list(range(cls.per_frame - 1, -1, -1)), is_dirty=index in self._touched
        )
        self._touched.add(index)
        self._frame_class[index] = page_class
        cls.n_frames += 1
        cls.partial.add(index, 0)
        return index

    def _empty_frame(self, page_class: int, index: int) -> None:
        cls = self._classes[page_class]
        # Out of the way, so that none of its pages finds a place in it again.
        cls.partial.remove(index, self._frames[index].n_used)
        for handle in [h for h in self._frames[index].slots if h is not None]:
            target = cls.partial.fullest()
            assert target is not None
            source = int(self.offsets[handle])
            self._take_out(handle, index)
            self._place(handle, page_class, target)
            self.store.copy_page(source, int(self.offsets[handle]), cls.page_bytes)
            if self._zero[handle]:
                self.store.zero(source, cls.page_bytes)
        self._give_back(index)

    def _place(self, handle: PageHandle, page_class: int, index: int) -> None:
        """Into a partial frame."""
        frame, cls = self._frames[index], self._classes[page_class]
        cls.partial.remove(index, frame.n_used)
        slot = frame.free_slots.pop()
        frame.slots[slot] = handle
        cls.n_used += 1
        if frame.free_slots:
            cls.partial.add(index, frame.n_used)
        self.offsets[handle] = index * self.frame_bytes + slot * cls.page_bytes

    def _take_out(self, handle: PageHandle, index: int) -> None:
        """Out of its frame, which the caller puts among the partial ones, or gives back."""
        frame = self._frames[index]
        frame.is_dirty = True
        cls = self._classes[frame.page_class]
        slot = (int(self.offsets[handle]) - index * self.frame_bytes) // cls.page_bytes
        frame.slots[slot] = None
        frame.free_slots.append(slot)
        cls.n_used -= 1

    def _free(self, handle: PageHandle) -> None:
        index = int(self.offsets[handle]) // self.frame_bytes
        frame = self._frames[index]
        cls = self._classes[frame.page_class]
        if frame.free_slots:
            cls.partial.remove(index, frame.n_used)
        self._take_out(handle, index)
        if frame.n_used:
            cls.partial.add(index, frame.n_used)
        else:
            self._give_back(index)
        self._owners[self.owner[handle]].used -= cls.page_bytes
        if self._zero[handle]:
            self.store.zero(int(self.offsets[handle]), cls.page_bytes)
            self._zero[handle] = False
        self.offsets[handle] = -1
        self.page_class[handle] = -1
        self._free_handles.append(handle)

    def _give_back(self, index: int) -> None:
        """A frame without pages serves any class."""
        self._classes[self._frames.pop(index).page_class].n_frames -= 1
        self._frame_class[index] = -1
        self._free_frames.append(index)

    def _add_cached(self, handles: I64, sign: int) -> None:
        """Pages that have become held by the tree alone (1), or are no longer (-1)."""
        for page_class, owner in zip(self.page_class[handles].tolist(), self.owner[handles].tolist(), strict=True):
            cls = self._classes[page_class]
            cls.n_cached += sign
            self._owners[owner].cached += sign * cls.page_bytes
