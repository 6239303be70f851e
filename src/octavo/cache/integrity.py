"""Recomputes every count of a cache from its tables and tree, and says where they disagree."""

from __future__ import annotations

from collections import Counter

from octavo.cache.manager import KVCache
from octavo.cache.pages import OPEN, SEALED, Page
from octavo.cache.radix import Node


def check(cache: KVCache) -> list[str]:
    """Every disagreement, in words; empty when the cache is sound. Between steps only."""
    problems: list[str] = []
    holders: Counter[int] = Counter()
    pages: dict[int, Page] = {}

    def hold(page: Page, who: str) -> None:
        known = pages.setdefault(page.handle, page)
        if known is not page:
            problems.append(f"two page objects share handle {page.handle} ({who})")
        holders[page.handle] += 1

    nodes = list(cache.tree.nodes())
    alive = set(map(id, nodes))
    for node in nodes:
        hold(node.page, "tree")
        for key, child in node.children.items():
            if child.parent is not node or child.key != key or child.identity != node.identity:
                problems.append("a child does not agree with its parent")
        if node.page.page_class != SEALED:
            problems.append(f"page {node.page.handle} in the tree is not sealed")
    for table in cache.tables:
        _check_table(cache, table.nodes, alive, problems)
        if len(table.pages) != table.num_computed_tokens // cache.page_size:
            problems.append(f"a table of {table.num_computed_tokens} tokens lists {len(table.pages)} full pages")
        if table.num_computed_tokens % cache.page_size and table.open_page is None:
            problems.append("a table ends inside a page but has no open page")
        for i, page in enumerate(table.pages):
            hold(page, "table")
            if page.page_class != SEALED:
                problems.append(f"full page {page.handle} of a table is not sealed")
            if i < len(table.nodes) and table.nodes[i].page is not page:
                problems.append(f"page {i} of a table is not its node's page")
        if table.open_page is not None:
            hold(table.open_page, "table")
            if table.open_page.page_class != OPEN:
                problems.append(f"open page {table.open_page.handle} is of the wrong class")

    for handle, page in pages.items():
        if page.ref_count != holders[handle]:
            problems.append(f"page {handle} counts {page.ref_count} holders, has {holders[handle]}")
    cached = sum(1 for n in nodes if holders[n.page.handle] == 1)
    if cached != cache.tree.n_cached:
        problems.append(f"the tree counts {cache.tree.n_cached} cached pages, has {cached}")
    if len(nodes) != cache.tree.n_nodes:
        problems.append(f"the tree counts {cache.tree.n_nodes} nodes, has {len(nodes)}")
    _check_arena(cache, pages, problems)
    return problems


def _check_table(cache: KVCache, nodes: list[Node], alive: set[int], problems: list[str]) -> None:
    parent: Node | None = None
    for node in nodes:
        if id(node) not in alive:
            problems.append("a table holds a node that is not in the tree")
        if node.parent is not parent:
            problems.append("a table's nodes are not one path")
        parent = node


def _check_arena(cache: KVCache, pages: dict[int, Page], problems: list[str]) -> None:
    arena = cache.arena
    seen: set[int] = set()
    free_frames = 0
    slots: Counter[int] = Counter()
    spans: list[tuple[int, int]] = []
    sizes = (cache.footprint.sealed.page_bytes, cache.footprint.open.page_bytes)
    for frame in arena.layout():
        if frame is None:
            free_frames += 1
            continue
        page_class, handles = frame
        slots[page_class] += len(handles)
        if all(h is None for h in handles):
            problems.append("a frame without pages is not free")
        for handle in handles:
            if handle is None:
                continue
            seen.add(handle)
            offset = int(arena.offsets[handle])
            spans.append((offset, offset + sizes[page_class]))
            if handle in pages and pages[handle].page_class != page_class:
                problems.append(f"page {handle} lies in a frame of another class")
    for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
        if start < end:
            problems.append(f"pages overlap at byte {start}")
    if seen != set(pages):
        problems.append(f"leaked pages {sorted(seen - set(pages))}, dangling pages {sorted(set(pages) - seen)}")
    stats = cache.stats()
    if stats.frames_free != free_frames:
        problems.append(f"the arena counts {stats.frames_free} free frames, has {free_frames}")
    if stats.sealed_active + stats.sealed_cached + stats.sealed_free != slots[SEALED]:
        problems.append("free + cached + active sealed pages differ from their slots")
    if stats.open_active + stats.open_free != slots[OPEN]:
        problems.append("free + active open pages differ from their slots")
