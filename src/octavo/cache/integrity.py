"""Recomputes every count of a cache from its tables and tree, and says where they disagree."""

from __future__ import annotations

from collections import Counter

import numpy as np

from octavo.cache.manager import KVCache
from octavo.cache.radix import Node, Resident
from octavo.cache.table import BlockTable


def check(cache: KVCache) -> list[str]:
    """Every disagreement, in words; empty when the cache is sound. Between steps only, and while nothing is pinned."""
    return [*_Check(cache).problems()]


class _Check:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._found: list[str] = []
        self._holders: Counter[int] = Counter()
        self._in_tree: set[int] = set()

    def problems(self) -> list[str]:
        nodes = list(self._cache.tree.nodes())
        for node in nodes:
            self._check_node(node)
        if len(nodes) != self._cache.tree.n_nodes:
            self._say(f"the tree counts {self._cache.tree.n_nodes} nodes, has {len(nodes)}")
        alive = set(map(id, nodes))
        for table in self._cache.tables:
            self._check_table(table, alive)
        locks = Counter(id(table.node) for table in self._cache.tables if table.node is not None)
        for node in nodes:
            if node.lock_count != locks[id(node)]:
                self._say(f"a node counts {node.lock_count} locks, has {locks[id(node)]}")
        self._check_arena()
        return self._found

    def _say(self, what: str) -> None:
        self._found.append(what)

    def _check_node(self, node: Node) -> None:
        for key, child in node.children.items():
            same = child.parent is node and child.key == key and child.identity == node.identity
            if child.expires_at > node.expires_at or child.deadline > node.deadline:
                self._say("a page would outlive its prefix")
            if not same or child.depth != node.depth + 1:
                self._say("a child does not agree with its parent")
        for g, slot in enumerate(node.slots):
            if isinstance(slot, Resident):
                if slot.handle in self._in_tree:
                    self._say(f"page {slot.handle} is in the tree twice")
                self._in_tree.add(slot.handle)
                self._hold(slot.handle, self._cache.classes.sealed(g, node.identity.stored_form).index, "the tree")

    def _check_table(self, table: BlockTable, alive: set[int]) -> None:
        size = self._cache.page_size
        n_full = table.num_computed_tokens // size
        if table.node is not None and table.node.is_cut_off == (id(table.node) in alive):
            self._say("a node that was cut off is in the tree")
        if table.publishes and table.node is not None and id(table.node) not in alive:
            self._say("a table holds a node that is not in the tree")
        if self._cache.prefix_cache and table.publishes and table.n_published != n_full:
            self._say(f"a table of {n_full} full pages has published {table.n_published}")
        for g, (group, own) in enumerate(zip(self._cache.groups, table.groups, strict=True)):
            if own.n_pages != n_full:
                self._say(f"a table of {table.num_computed_tokens} tokens lists {own.n_pages} full pages")
            if own.n_passed > group.first_page_read(table.num_computed_tokens, size):
                self._say("a table has given back pages that it still reads")
            if table.num_computed_tokens % size and own.open_page is None:
                self._say("a table ends inside a page but has no open page")
            sealed = self._cache.classes.sealed(g, table.identity.stored_form)
            positions = (own.n_passed + np.arange(len(own.entries))) * size
            if not np.array_equal(own.entries.positions, positions) or (own.entries.n_tokens != size).any():
                self._say("a table's entries do not follow one another")
            if (own.entries.classes != sealed.index).any():
                self._say("a table's entry is of the wrong class")
            for handle in own.entries.handles:
                self._hold(int(handle), sealed.index, "a table")
            if own.open_page is not None:
                self._hold(own.open_page, self._cache.classes.opened(g).index, "a table")
            if table.publishes:
                self._check_path(table, g)

    def _check_path(self, table: BlockTable, g: int) -> None:
        """What a table reads is what its path has, page by page, where the path has anything."""
        own, node = table.groups[g], table.node
        while node is not None and node.depth >= own.n_passed:
            slot = node.slots[g]
            if not isinstance(slot, Resident) or slot.handle != int(own.entries.handles[node.depth - own.n_passed]):
                self._say(f"page {node.depth} of a table is not its node's page")
            node = node.parent

    def _hold(self, handle: int, page_class: int, who: str) -> None:
        self._holders[handle] += 1
        if self._cache.arena.page_class[handle] != page_class:
            self._say(f"page {handle} of {who} is not of class {page_class}")

    def _check_arena(self) -> None:
        arena, classes = self._cache.arena, self._cache.classes
        live = np.flatnonzero(arena.offsets >= 0)
        if set(live.tolist()) != set(self._holders):
            leaked, dangling = set(live.tolist()) - set(self._holders), set(self._holders) - set(live.tolist())
            self._say(f"leaked pages {sorted(leaked)}, dangling pages {sorted(dangling)}")
        for handle, n in self._holders.items():
            if arena.ref_count[handle] != n:
                self._say(f"page {handle} counts {arena.ref_count[handle]} holders, has {n}")
        if set(np.flatnonzero(arena.published).tolist()) != self._in_tree:
            self._say("pages that count as published are not those in the tree")
        sizes = np.array([page_class.page_bytes for page_class in classes])
        starts = np.sort(arena.offsets[live])
        ends = (arena.offsets[live] + sizes[arena.page_class[live]])[np.argsort(arena.offsets[live])]
        for at in np.flatnonzero(ends[:-1] > starts[1:]):
            self._say(f"pages overlap at byte {starts[at + 1]}")
        snapshot = arena.snapshot()
        frames = arena.offsets[live] // arena.frame_bytes
        if (snapshot.frame_class[frames] != arena.page_class[live]).any():
            self._say("a page lies in a frame of another class")
        for tenant, owner in self._cache._owners.items():
            handles = [h for h in live.tolist() if arena.owner[h] == owner]
            n_bytes = sum(arena.page_bytes(h) for h in handles)
            cached = sum(arena.page_bytes(h) for h in handles if h in self._in_tree and self._holders[h] == 1)
            usage = arena.usage_of(owner)
            if (usage.used, usage.cached) != (n_bytes, cached):
                self._say(f"tenant {tenant!r} counts {usage.used}, {usage.cached} bytes, has {n_bytes}, {cached}")
            cap = self._cache.quotas.cap(tenant)
            if cap is not None and n_bytes > cap:
                self._say(f"tenant {tenant!r} has {n_bytes} bytes, more than its cap of {cap}")
        for page_class in classes:
            self._check_class(page_class.index, live, snapshot.frame_class)
        used = np.zeros(arena.n_frames, dtype=bool)
        used[frames] = True
        if ((snapshot.frame_class >= 0) != used).any():
            self._say("a frame without pages is not free")
        if arena.free_frames != arena.n_frames - int(used.sum()):
            self._say(f"the arena counts {arena.free_frames} free frames, has {arena.n_frames - int(used.sum())}")

    def _check_class(self, index: int, live: np.ndarray, frame_class: np.ndarray) -> None:
        usage = self._cache.arena.usage(index)
        own = live[self._cache.arena.page_class[live] == index]
        cached = sum(1 for h in own.tolist() if h in self._in_tree and self._holders[h] == 1)
        if usage.cached != cached or usage.active != len(own) - cached:
            counted, found = (usage.active, usage.cached), (len(own) - cached, cached)
            self._say(f"class {index} counts (active, cached) {counted} pages, has {found}")
        slots = int((frame_class == index).sum()) * self._cache.footprint.per_frame(self._cache.classes[index])
        if usage.active + usage.cached + usage.free != slots:
            self._say(f"active + cached + free pages of class {index} differ from its slots")
