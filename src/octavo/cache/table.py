"""Block tables: the pages of one sequence, for each cache group, in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.cache.arena import PageHandle
from octavo.cache.radix import Node, PrefixIdentity

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


class Entries:
    """Pages as growing arrays, so that a step appends to them and takes them as they are.

    An entry is a page's handle, its class, the position of its first token and the number of its tokens.
    """

    __slots__ = ("_classes", "_handles", "_n_tokens", "_positions", "_start", "_stop")

    def __init__(self, capacity: int = 16) -> None:
        self._handles = np.empty(capacity, dtype=np.int64)
        self._classes = np.empty(capacity, dtype=np.uint8)
        self._positions = np.empty(capacity, dtype=np.int32)
        self._n_tokens = np.empty(capacity, dtype=np.int32)
        self._start = self._stop = 0

    def __len__(self) -> int:
        return self._stop - self._start

    # Views, valid until the next change.

    @property
    def handles(self) -> I64:
        return self._handles[self._start : self._stop]

    @property
    def classes(self) -> NDArray[np.uint8]:
        return self._classes[self._start : self._stop]

    @property
    def positions(self) -> I32:
        return self._positions[self._start : self._stop]

    @property
    def n_tokens(self) -> I32:
        return self._n_tokens[self._start : self._stop]

    def append(self, handle: PageHandle, page_class: int, position: int, n_tokens: int) -> None:
        if self._stop == len(self._handles):
            self._make_room(1)
        i = self._stop
        self._handles[i], self._classes[i] = handle, page_class
        self._positions[i], self._n_tokens[i] = position, n_tokens
        self._stop += 1

    def extend(self, handles: I64, page_class: int, first_position: int, page_size: int) -> None:
        """Full pages that follow one another."""
        n = len(handles)
        self._make_room(n)
        i, j = self._stop, self._stop + n
        self._handles[i:j], self._classes[i:j], self._n_tokens[i:j] = handles, page_class, page_size
        self._positions[i:j] = np.arange(first_position, first_position + n * page_size, page_size, dtype=np.int32)
        self._stop = j

    def replace(self, i: int, handle: PageHandle) -> None:
        self._handles[self._start + i] = handle

    def drop_first(self, n: int) -> None:
        self._start += n

    def drop_last(self, n: int) -> None:
        self._stop -= n

    def copy(self) -> Entries:
        other = Entries(max(16, 2 * len(self)))
        other._stop = len(self)
        for name in ("_handles", "_classes", "_positions", "_n_tokens"):
            getattr(other, name)[: len(self)] = getattr(self, name)[self._start : self._stop]
        return other

    def _make_room(self, n: int) -> None:
        """Space for n more, by moving what is left to the front or doubling."""
        used = len(self)
        if self._stop + n <= len(self._handles):
            return
        capacity = len(self._handles)
        while capacity < 2 * used + n:
            capacity *= 2
        for name in ("_handles", "_classes", "_positions", "_n_tokens"):
            old = getattr(self, name)
            new = np.empty(capacity, dtype=old.dtype)
            new[:used] = old[self._start : self._stop]
            setattr(self, name, new)
        self._start, self._stop = 0, used


@dataclass(slots=True, eq=False)
class GroupTable:
    """One sequence's pages of one group.

    Attributes:
        entries: the full pages that it still reads. During a step this includes the pages that the step will seal.
        n_passed: full pages before these that it no longer reads and has given back.
        open_page: the exact page at the sequence's end; kept from its first use until the table is released.
    """

    entries: Entries
    n_passed: int = 0
    open_page: PageHandle | None = None

    @property
    def n_pages(self) -> int:
        """Full pages so far, in the sequence."""
        return self.n_passed + len(self.entries)


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's view of the cache. Changed only by `manager.KVCache`.

    Attributes:
        identity: what its pages are published under; names the form in which they are sealed.
        groups: one for each cache group. Outside a step, n_pages == num_computed_tokens // page_size in each.
        node: the tree's node of its last published page, locked; None before the first.
        num_computed_tokens: tokens whose keys and values are in the pages.
        erased: what it stands for was erased while it was read: it publishes nothing more, and leaves no bytes behind.
    """

    identity: PrefixIdentity
    groups: tuple[GroupTable, ...]
    node: Node | None = None
    num_computed_tokens: int = 0
    erased: bool = False

    @property
    def publishes(self) -> bool:
        """Whether its pages go into the tree. Not once its path was erased, or has passed its deadline."""
        return not self.erased and (self.node is None or not self.node.is_cut_off)

    @property
    def n_published(self) -> int:
        """Pages of it that are in the tree: the first ones."""
        return 0 if self.node is None else self.node.depth + 1
