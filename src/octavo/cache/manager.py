"""The KV cache as the engine sees it: tables of pages over one arena and one prefix tree, within a hard budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.cache.arena import Arena, PageClass
from octavo.cache.footprint import Footprint
from octavo.cache.pages import OPEN, SEALED, Page, release
from octavo.cache.radix import EvictionPolicy, Node, PrefixIdentity, PrefixTree
from octavo.cache.table import BlockTable
from octavo.errors import OutOfPages

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Page counts. For sealed pages: active + cached + free == slots in frames of their class."""

    sealed_active: int
    sealed_cached: int
    sealed_free: int
    open_active: int
    open_free: int
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
        self, footprint: Footprint, *, prefix_cache: bool = True, eviction: EvictionPolicy | None = None
    ) -> None:
        self.footprint = footprint
        self.page_size = footprint.page_size
        self.prefix_cache = prefix_cache
        self.arena = Arena(
            footprint.n_frames, footprint.frame_bytes, (footprint.sealed.page_bytes, footprint.open.page_bytes)
        )
        self.tree = PrefixTree(self.arena, eviction)
        self.tables: set[BlockTable] = set()

    def new_table(self, identity: PrefixIdentity) -> BlockTable:
        table = BlockTable(identity)
        self.tables.add(table)
        return table

    def match_prefix(self, table: BlockTable, tokens: I32, max_tokens: int) -> int:
        """Fill an empty table with published pages that begin `tokens`; returns how many tokens they hold.

        At most `max_tokens` are taken, in whole pages: a caller that needs logits keeps the last token back.
        """
        if table.pages or table.num_computed_tokens:
            raise ValueError("match_prefix needs an empty table")
        path = self._published(table.identity, tokens, max_tokens)
        for node in path:
            self.tree.lock(node)
        table.nodes = path
        table.pages = [node.page for node in path]
        table.num_computed_tokens = len(path) * self.page_size
        return table.num_computed_tokens

    def published_tokens(self, identity: PrefixIdentity, tokens: I32, max_tokens: int) -> int:
        """How many tokens `match_prefix` would find."""
        return len(self._published(identity, tokens, max_tokens)) * self.page_size

    def reserve(self, table: BlockTable, n_tokens: int) -> None:
        """Make room for the next `n_tokens`. Raises OutOfPages with the table unchanged."""
        end = table.num_computed_tokens + n_tokens
        n_sealed = end // self.page_size - len(table.pages)
        needs_open = table.open_page is None and (
            end % self.page_size != 0 or table.num_computed_tokens % self.page_size != 0
        )
        got: list[Page] = []
        try:
            if needs_open:
                got.append(self._allocate(OPEN))
            got.extend(self._allocate(SEALED) for _ in range(n_sealed))
        except OutOfPages:
            for page in got:
                release(page, self.arena)
            raise
        if needs_open:
            table.open_page = got.pop(0)
        table.pages.extend(got)

    def commit(self, table: BlockTable, tokens: I32, n_tokens: int) -> None:
        """The step has written `n_tokens` more. `tokens` are the sequence's ids from its start, at least as many as
        are now computed; pages that became full are published."""
        table.num_computed_tokens += n_tokens
        n_full = table.num_computed_tokens // self.page_size
        if n_full != len(table.pages):
            raise ValueError(f"{len(table.pages)} pages reserved, {n_full} full after the step")
        if not self.prefix_cache:
            return
        for i in range(len(table.nodes), n_full):
            key = tokens[i * self.page_size : (i + 1) * self.page_size].tobytes()
            parent = table.nodes[-1] if table.nodes else None
            node = self.tree.insert(table.identity, parent, key, table.pages[i])
            table.pages[i] = node.page
            table.nodes.append(node)

    def rollback(self, table: BlockTable) -> None:
        """Give back what was reserved for a step that did not happen."""
        while len(table.pages) > table.num_computed_tokens // self.page_size:
            release(table.pages.pop(), self.arena)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same tokens: sealed pages are shared, the open page is copied.

        Between steps only. Raises OutOfPages with nothing changed.
        """
        copy: Page | None = None
        if table.open_page is not None and table.num_computed_tokens % self.page_size:
            copy = self._allocate(OPEN)
            self.arena.view(copy.handle)[:] = self.arena.view(table.open_page.handle)
        child = self.new_table(table.identity)
        child.num_computed_tokens = table.num_computed_tokens
        child.open_page = copy
        child.nodes = list(table.nodes)
        child.pages = list(table.pages)
        for node in child.nodes:
            self.tree.lock(node)
        for page in child.pages[len(child.nodes) :]:
            page.ref_count += 1
        return child

    def release(self, table: BlockTable) -> None:
        """The sequence is over or preempted. Published pages stay cached; the rest is freed."""
        for page in reversed(table.pages[len(table.nodes) :]):
            release(page, self.arena)
        for node in reversed(table.nodes):
            self.tree.unlock(node)
        if table.open_page is not None:
            release(table.open_page, self.arena)
        table.pages, table.nodes, table.open_page, table.num_computed_tokens = [], [], None, 0
        self.tables.discard(table)

    def offsets(self, pages: Sequence[Page]) -> I64:
        """int64 [len(pages)]: byte offsets into `arena.memory`, valid until pages are next allocated or freed."""
        return self.arena.offsets[[p.handle for p in pages]]

    def offset(self, page: Page) -> int:
        return int(self.arena.offsets[page.handle])

    def available_pages(self) -> int:
        """Sealed pages that could be had now: free slots, free frames, and cached pages that may be evicted."""
        free = self.arena.usage(SEALED).free
        return free + self.arena.free_frames * self.footprint.sealed_per_frame + self.tree.n_cached

    def stats(self) -> CacheStats:
        sealed, opened = self.arena.usage(SEALED), self.arena.usage(OPEN)
        return CacheStats(
            sealed_active=sealed.used - self.tree.n_cached,
            sealed_cached=self.tree.n_cached,
            sealed_free=sealed.free,
            open_active=opened.used,
            open_free=opened.free,
            frames_total=self.arena.n_frames,
            frames_free=self.arena.free_frames,
            frame_bytes=self.arena.frame_bytes,
            used_bytes=sealed.used * self.footprint.sealed.page_bytes + opened.used * self.footprint.open.page_bytes,
            frame_slack_bytes=sealed.frame_slack_bytes + opened.frame_slack_bytes,
            evicted_pages=self.tree.evicted_pages,
        )

    def _published(self, identity: PrefixIdentity, tokens: I32, max_tokens: int) -> list[Node]:
        if not self.prefix_cache:
            return []
        max_pages = min(max_tokens, len(tokens)) // self.page_size
        whole = tokens[: max_pages * self.page_size].tobytes()
        return self.tree.match_prefix(identity, whole, self.page_size * tokens.itemsize, max_pages)

    def _allocate(self, page_class: PageClass) -> Page:
        while True:
            try:
                return Page(self.arena.allocate(page_class), page_class)
            except OutOfPages:
                # Evicting frees sealed slots; when another class asks, compaction turns those into a free frame.
                if not self.arena.compact() and not self.tree.evict_one():
                    raise
