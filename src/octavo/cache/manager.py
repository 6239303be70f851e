"""The KV cache as the engine sees it: tables of pages over one arena and one prefix tree, within a hard budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from octavo.cache.arena import Arena, ClassUsage, OwnerUsage, PageHandle
from octavo.cache.classes import PageClass
from octavo.cache.eviction import CacheObserver, EvictionPolicy
from octavo.cache.footprint import Footprint
from octavo.cache.lifetime import Lifetime
from octavo.cache.quotas import Quotas
from octavo.cache.radix import Erasure, Match, MatchEnd, PrefixIdentity, PrefixTree, Resident
from octavo.cache.receipt import Holdings
from octavo.cache.store import PageStore
from octavo.cache.table import BlockTable, Entries, GroupTable
from octavo.errors import OutOfPages

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of the whole cache. `usage` is by page class: active + cached + free == slots in frames of the class."""

    usage: tuple[ClassUsage, ...]
    frames_total: int
    frames_free: int
    frame_bytes: int
    used_bytes: int
    #: Bytes at frame ends that no page fits into, in frames that are in use.
    frame_slack_bytes: int
    evicted_pages: int


class KVCache:
    """Rules:

    - `reserve` before a step, `commit` after it; a step that failed is undone by `rollback`.
    - Pages are published by `commit`, when every layer has written them, never before.
    - `reserve` either gets everything or changes nothing of the table (it may have evicted cached pages).
    - One thread.
    """

    def __init__(
        self,
        footprint: Footprint,
        store: PageStore,
        *,
        prefix_cache: bool = True,
        eviction: EvictionPolicy | None = None,
        observer: CacheObserver | None = None,
        lifetime: Lifetime | None = None,
        quotas: Quotas | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.footprint = footprint
        self.classes = footprint.classes
        self.groups = footprint.classes.spec.groups
        self.page_size = footprint.page_size
        self.prefix_cache = prefix_cache
        self.arena = Arena(
            store, footprint.n_frames, footprint.frame_bytes, [page_class.page_bytes for page_class in self.classes]
        )
        self.tree = PrefixTree(self.arena, self.groups, self.page_size, eviction, observer, lifetime, clock)
        self.quotas = quotas or Quotas()
        self._owners: dict[str, int] = {}
        self.tables: set[BlockTable] = set()

    def new_table(self, identity: PrefixIdentity) -> BlockTable:
        """An empty table. Raises KeyError where the cache has no class for the identity's stored form."""
        for g in range(len(self.groups)):
            self.classes.sealed(g, identity.stored_form)
        table = BlockTable(identity, tuple(GroupTable(Entries()) for _ in self.groups))
        self.tables.add(table)
        return table

    def find_prefix(self, identity: PrefixIdentity, tokens: I32, max_tokens: int) -> Match:
        """The longest published prefix of `tokens`, in whole pages, of at most `max_tokens`. Changes nothing."""
        if not self.prefix_cache:
            return Match((), 0, MatchEnd("cold", 0))
        max_pages = min(max_tokens, len(tokens)) // self.page_size
        return self.tree.match_prefix(identity, tokens[: max_pages * self.page_size].tobytes(), max_pages)

    def match_prefix(self, table: BlockTable, tokens: I32, max_tokens: int) -> Match:
        """Fill an empty table with published pages that begin `tokens`.

        At most `max_tokens` are taken, in whole pages: a caller that needs logits keeps the last token back.
        """
        if table.num_computed_tokens or any(group.n_pages for group in table.groups):
            raise ValueError("match_prefix needs an empty table")
        match = self.find_prefix(table.identity, tokens, max_tokens)
        if match.node is None:
            return match
        self.tree.lock(match.node)
        self.tree.touch(match.node)
        for g, (group, own) in enumerate(zip(self.groups, table.groups, strict=True)):
            first = min(group.first_page_read(match.n_tokens, self.page_size), len(match.path))
            slots = [node.slots[g] for node in match.path[first:]]
            handles = np.array([slot.handle for slot in slots if isinstance(slot, Resident)], dtype=np.int64)
            self.arena.hold(handles)
            page_class = self.classes.sealed(g, table.identity.stored_form)
            own.entries.extend(handles, page_class.index, first * self.page_size, self.page_size)
            own.n_passed = first
        table.node = match.node
        table.num_computed_tokens = match.n_tokens
        return match

    def reserve(self, table: BlockTable, n_tokens: int) -> None:
        """Make room for the next `n_tokens`. Raises OutOfPages with the table unchanged."""
        start, size = table.num_computed_tokens, self.page_size
        end = start + n_tokens
        got: list[PageHandle] = []
        wanted: list[PageClass] = []
        for g, own in enumerate(table.groups):
            if own.open_page is None and (end % size != 0 or start % size != 0):
                wanted.append(self.classes.opened(g))
            wanted += [self.classes.sealed(g, table.identity.stored_form)] * (end // size - own.n_pages)
        try:
            for page_class in wanted:
                got.append(self._allocate(page_class, table.identity.tenant))
        except OutOfPages:
            self.arena.release(np.array(got, dtype=np.int64))
            raise
        for handle, page_class in zip(got, wanted, strict=True):
            own = table.groups[page_class.group]
            if page_class.is_open:
                own.open_page = handle
            else:
                own.entries.append(handle, page_class.index, own.n_pages * size, size)

    def commit(self, table: BlockTable, tokens: I32, n_tokens: int) -> None:
        """The step has written `n_tokens` more. `tokens` are the sequence's ids from its start, at least as many as
        are now computed; pages that became full are published."""
        n_full = (table.num_computed_tokens + n_tokens) // self.page_size
        if any(own.n_pages != n_full for own in table.groups):
            reserved = [own.n_pages for own in table.groups]
            raise ValueError(f"{reserved} pages reserved, {n_full} full after the step")
        table.num_computed_tokens += n_tokens
        if self.prefix_cache and table.publishes:
            for page in range(table.n_published, n_full):
                self._publish(table, page, tokens[page * self.page_size : (page + 1) * self.page_size].tobytes())
        self._give_back_passed(table)

    def rollback(self, table: BlockTable) -> None:
        """Give back what was reserved for a step that did not happen."""
        n_full = table.num_computed_tokens // self.page_size
        for own in table.groups:
            n = own.n_pages - n_full
            if n > 0:
                self.arena.release(own.entries.handles[-n:])
                own.entries.drop_last(n)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same tokens: sealed pages are shared, open pages are copied.

        Between steps only. Raises OutOfPages with nothing changed.
        """
        copies: list[PageHandle | None] = []
        try:
            for g, own in enumerate(table.groups):
                unfinished = own.open_page is not None and table.num_computed_tokens % self.page_size
                copies.append(self._allocate(self.classes.opened(g), table.identity.tenant) if unfinished else None)
        except OutOfPages:
            self.arena.release(np.array([c for c in copies if c is not None], dtype=np.int64))
            raise
        child = self.new_table(table.identity)
        child.num_computed_tokens, child.node, child.erased = table.num_computed_tokens, table.node, table.erased
        if child.node is not None:
            self.tree.lock(child.node)
        for g, (own, new, copy) in enumerate(zip(table.groups, child.groups, copies, strict=True)):
            self.arena.hold(own.entries.handles)
            new.entries, new.n_passed, new.open_page = own.entries.copy(), own.n_passed, copy
            if copy is not None and own.open_page is not None:
                offsets = self.arena.offsets
                n_bytes = self.classes.opened(g).page_bytes
                self.arena.store.copy_page(int(offsets[own.open_page]), int(offsets[copy]), n_bytes)
        return child

    def release(self, table: BlockTable, *, refresh: bool = True) -> None:
        """The sequence is over or preempted. Published pages stay cached; the rest is freed.

        refresh: whether this was a use, after which their time to live begins anew.
        """
        for g, own in enumerate(table.groups):
            if table.erased:
                self._zero_when_freed(own)
            self.arena.release(own.entries.handles)
            if own.open_page is not None:
                self.arena.release(np.array([own.open_page], dtype=np.int64))
            self._tell_passed(table, g, own.n_passed, own.n_pages)
            own.entries, own.n_passed, own.open_page = Entries(), 0, None
        if table.node is not None:
            if refresh and table.publishes:
                self.tree.touch(table.node)
            self.tree.unlock(table.node)
        table.node, table.num_computed_tokens = None, 0
        self.tables.discard(table)

    def erase(self, tenant: str, salt: str | None = None) -> Erasure:
        """Unpublish a tenant's pages (of one salt, if one is given) at once, zero what nobody reads now, and the rest
        when its last reader ends. Between steps only.

        Running requests go on to their answers, but publish nothing more.
        """
        for table in self.tables:
            if table.identity.tenant == tenant and salt in (None, table.identity.salt):
                table.erased = True
                for own in table.groups:
                    self._zero_when_freed(own)
        erasure = self.tree.erase(tenant, salt)
        # Pages that were evicted or moved before have left bytes in what is free now.
        self.arena.scrub()
        return erasure

    def expire(self) -> int:
        """Let go of what has outlived its time, a bounded number of pages at a time; how many."""
        return self.tree.expire()

    def more_pages(self, table: BlockTable, n_tokens: int) -> Counter[int]:
        """Pages of each class (by index) that the table lacks to hold n_tokens."""
        pages = self.footprint.pages_for(max(n_tokens, table.num_computed_tokens), table.identity.stored_form)
        for g, own in enumerate(table.groups):
            pages[self.classes.sealed(g, table.identity.stored_form).index] -= len(own.entries)
            pages[self.classes.opened(g).index] -= own.open_page is not None
        return +pages

    def has_room(self, pages: Mapping[int, int], tenant: str) -> bool:
        """Whether so many more pages of each class (by index) can be had for a tenant, at the price of all that is only
        cached and may be taken. Its cap is another question: `within_cap`."""
        need: Counter[int] = Counter(pages)
        for page_class in self.classes:
            need[page_class.index] += self.arena.usage(page_class.index).active
        frames = self.footprint.frames_holding(need)
        protected = sum(self._protected(other) for other in self._owners if other != tenant)
        if protected:
            # Of which classes is not known: each may keep a frame that is not full.
            sealed = [page_class for page_class in self.classes if not page_class.is_open]
            filled = min(self.footprint.per_frame(page_class) * page_class.page_bytes for page_class in sealed)
            frames += -(-protected // filled) + len(sealed)
        return frames <= self.arena.n_frames

    def within_cap(self, pages: Mapping[int, int], tenant: str) -> bool:
        """Whether so many more pages of each class (by index) stay within a tenant's cap, at the price of all that is
        only cached of it."""
        cap, own = self.quotas.cap(tenant), self.usage_of(tenant)
        n_bytes = sum(n * self.classes[index].page_bytes for index, n in pages.items())
        return cap is None or own.used - own.cached + n_bytes <= cap

    def bytes_for(self, n_tokens: int) -> int:
        """Of the pages that one sequence of so many tokens holds, sharing nothing."""
        pages = self.footprint.pages_for(n_tokens)
        return sum(n * self.classes[index].page_bytes for index, n in pages.items())

    def usage_of(self, tenant: str) -> OwnerUsage:
        """Bytes of pages on a tenant's account."""
        return self.arena.usage_of(self._owners[tenant]) if tenant in self._owners else OwnerUsage()

    def _protected(self, tenant: str) -> int:
        """Bytes of a tenant's cached pages that no other tenant's request can take."""
        usage, floor = self.usage_of(tenant), self.quotas.floor(tenant)
        if not floor:
            return 0
        return min(max(floor + self._most_at_once() - (usage.used - usage.cached), 0), usage.cached)

    def _most_at_once(self) -> int:
        """The most bytes that one eviction takes: a node's page in every group, each of the largest form."""
        groups = range(len(self.groups))
        return sum(max(c.page_bytes for c in self.classes if c.group == g and not c.is_open) for g in groups)

    def holdings(self, tables: Iterable[BlockTable]) -> Holdings:
        """The distinct pages that these tables hold."""
        held = np.zeros(len(self.arena.page_class), dtype=np.bool_)
        for table in tables:
            for own in table.groups:
                held[own.entries.handles] = True
                if own.open_page is not None:
                    held[own.open_page] = True
        handles = np.flatnonzero(held)
        n_pages = np.bincount(self.arena.page_class[handles], minlength=len(self.classes)).tolist()
        by_form: Counter[str] = Counter()
        for n, page_class in zip(n_pages, self.classes, strict=True):
            if n:
                by_form[page_class.form] += n * page_class.page_bytes
        shared = int(np.count_nonzero(self.arena.published[handles]))
        n_open = sum(n for n, page_class in zip(n_pages, self.classes, strict=True) if page_class.is_open)
        return Holdings(shared, len(handles) - shared - n_open, n_open, dict(by_form))

    def stats(self) -> CacheStats:
        usage = tuple(self.arena.usage(page_class.index) for page_class in self.classes)
        return CacheStats(
            usage=usage,
            frames_total=self.arena.n_frames,
            frames_free=self.arena.free_frames,
            frame_bytes=self.arena.frame_bytes,
            used_bytes=sum((u.active + u.cached) * c.page_bytes for u, c in zip(usage, self.classes, strict=True)),
            frame_slack_bytes=sum(u.frame_slack_bytes for u in usage),
            evicted_pages=self.tree.evicted_pages,
        )

    def close(self) -> None:
        """Give the memory back. Nothing may be asked of the cache afterwards."""
        self.arena.store.close()

    def _zero_when_freed(self, own: GroupTable) -> None:
        self.arena.zero_when_freed(own.entries.handles)
        if own.open_page is not None:
            self.arena.zero_when_freed(np.array([own.open_page], dtype=np.int64))

    def _publish(self, table: BlockTable, page: int, key: bytes) -> None:
        handles = [int(own.entries.handles[page - own.n_passed]) for own in table.groups]
        inserted = self.tree.insert(table.identity, table.node, key, handles)
        for own, mine, theirs in zip(table.groups, handles, inserted.handles, strict=True):
            if mine != theirs:
                self.arena.hold(np.array([theirs], dtype=np.int64))
                self.arena.release(np.array([mine], dtype=np.int64))
                own.entries.replace(page - own.n_passed, theirs)
        self.tree.lock(inserted.node)
        if table.node is not None:
            self.tree.unlock(table.node)
        table.node = inserted.node

    def _give_back_passed(self, table: BlockTable) -> None:
        """Pages that no later token reads are let go; the published ones stay in the tree, cached."""
        for g, (group, own) in enumerate(zip(self.groups, table.groups, strict=True)):
            n = min(group.first_page_read(table.num_computed_tokens, self.page_size), own.n_pages) - own.n_passed
            if n <= 0:
                continue
            self.arena.release(own.entries.handles[:n])
            own.entries.drop_first(n)
            own.n_passed += n
            self._tell_passed(table, g, own.n_passed - n, own.n_passed)

    def _tell_passed(self, table: BlockTable, g: int, first: int, end: int) -> None:
        """The table no longer reads its pages [first, end) of a group; the tree is told where they may go singly."""
        if self.groups[g].serves_from_leaves:
            return
        node = table.node
        while node is not None and node.depth >= first:
            if node.depth < end:
                self.tree.passed(node, g)
            node = node.parent

    def _allocate(self, page_class: PageClass, tenant: str) -> PageHandle:
        """Raises OutOfPages, with `tenant` set where it is the tenant's own cap that is reached."""
        owner = self._owners.get(tenant)
        if owner is None:
            owner = self._owners[tenant] = self.arena.new_owner()
        cap = self.quotas.cap(tenant)
        while cap is not None and self.arena.usage_of(owner).used + page_class.page_bytes > cap:
            if not self.tree.evict_one(lambda victim: victim == tenant):
                raise OutOfPages(f"tenant {tenant!r} has reached its cap of {cap:,} bytes", tenant=tenant)
        while True:
            try:
                return self.arena.allocate(page_class.index, owner)
            except OutOfPages:
                # Evicting frees slots of some class; when another asks, compaction turns those into a free frame.
                if not self.arena.compact() and not self.tree.evict_one(partial(self._may_take, tenant)):
                    raise

    def _may_take(self, tenant: str, victim: str) -> bool:
        """Whether a tenant's request may take a page of another: not below the other's floor."""
        if victim == tenant or not self.quotas.floor(victim):
            return True
        return self.usage_of(victim).used - self._most_at_once() >= self.quotas.floor(victim)
