"""The prefix tree: which sealed pages can serve the beginning of a prompt.

Page-granular: an edge is the token ids of one page, compared as bytes, never only hashed. Below one root, the path from
the root to a node spells everything that a page's content depends on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from octavo.cache.arena import Arena
from octavo.cache.pages import Page, release


class PrefixIdentity(NamedTuple):
    """What two sequences must agree on, beside their tokens, to read each other's pages.

    Fields are compared one by one; nothing is concatenated.
    """

    #: Backend, instruction-set path, kernel revision, page size, open-page dtype, weights (numeric fingerprint).
    fingerprint: tuple[str, ...]
    adapter: str
    #: Name of the sealed form and how it is read ("all": every token, exactly as the visibility rule says).
    stored_form: str
    reading_policy: str
    #: Whose pages these are: a tenant, divided further by a client's salt.
    namespace: str


@dataclass(slots=True, eq=False)
class Node:
    """One published page. `key` is its token ids as little-endian int32 bytes."""

    key: bytes
    page: Page
    parent: Node | None
    identity: PrefixIdentity
    children: dict[bytes, Node] = field(default_factory=dict)
    last_used: int = 0


class EvictionPolicy(Protocol):
    """Which unreferenced leaf goes first: the one with the lowest priority."""

    def priority(self, node: Node) -> float: ...


class LeastRecentlyUsed:
    """Evict the leaf whose last use lies furthest back."""

    def priority(self, node: Node) -> float:
        return float(node.last_used)


class PrefixTree:
    """Published pages by content.

    Rules:
    - The tree is one holder of each of its pages; a block table that reads a page is another. A page with the tree
      as its only holder is cached and may be evicted, leaves first.
    - Whoever holds a node's page holds those of all its ancestors (tables hold whole paths), so cached pages never
      sit above active ones.
    - `lock` after `match_prefix`, before anything else may evict.
    """

    def __init__(self, arena: Arena, policy: EvictionPolicy | None = None) -> None:
        self._arena = arena
        self._policy = policy or LeastRecentlyUsed()
        self._roots: dict[PrefixIdentity, dict[bytes, Node]] = {}
        self._heap: list[tuple[float, int, Node]] = []
        self._clock = 0
        self._pushes = 0
        self.n_nodes = 0
        self.n_cached = 0
        self.evicted_pages = 0

    def match_prefix(self, identity: PrefixIdentity, tokens: bytes, page_bytes: int, max_pages: int) -> list[Node]:
        """The longest published path whose pages equal the beginning of `tokens` (int32 bytes), at most max_pages."""
        path: list[Node] = []
        level = self._roots.get(identity, {})
        for i in range(max_pages):
            node = level.get(tokens[i * page_bytes : (i + 1) * page_bytes])
            if node is None:
                break
            path.append(node)
            level = node.children
        return path

    def lock(self, node: Node) -> None:
        """A table begins to read this node's page."""
        if node.page.ref_count == 1:
            self.n_cached -= 1
        node.page.ref_count += 1
        self._touch(node)

    def unlock(self, node: Node) -> None:
        """A table stops reading this node's page. Unlock a path from its end."""
        if node.page.ref_count < 2:
            raise ValueError("unlocked a page that no table holds")
        node.page.ref_count -= 1
        if node.page.ref_count == 1:
            self.n_cached += 1
            self._offer(node)

    def insert(self, identity: PrefixIdentity, parent: Node | None, key: bytes, page: Page) -> Node:
        """Publish a page that its caller holds, below `parent` (None: at the root).

        Returns the node for this content. If one existed already, its page is the one to use from now on: the
        caller's hold moves to it and the caller's page is released.
        """
        level = self._roots.setdefault(identity, {}) if parent is None else parent.children
        node = level.get(key)
        if node is not None:
            if node.page is not page:
                self.lock(node)
                release(page, self._arena)
            return node
        node = Node(key, page, parent, identity)
        level[key] = node
        page.ref_count += 1
        self.n_nodes += 1
        self._touch(node)
        return node

    def evict_one(self) -> bool:
        """Free the cached leaf with the lowest priority; False if there is none."""
        while self._heap:
            priority, _, node = heapq.heappop(self._heap)
            if not self._is_evictable(node):
                continue
            now = self._policy.priority(node)
            if now != priority:
                self._push(node, now)
                continue
            self._remove(node)
            self.evicted_pages += 1
            return True
        return False

    def clear(self) -> None:
        """Evict everything that no table holds."""
        while self.evict_one():
            pass

    def nodes(self) -> Iterator[Node]:
        stack = [n for level in self._roots.values() for n in level.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def _is_evictable(self, node: Node) -> bool:
        return not node.children and node.page.ref_count == 1 and self._level(node).get(node.key) is node

    def _level(self, node: Node) -> dict[bytes, Node]:
        return self._roots.get(node.identity, {}) if node.parent is None else node.parent.children

    def _offer(self, node: Node) -> None:
        if not node.children:
            self._push(node, self._policy.priority(node))

    def _push(self, node: Node, priority: float) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (priority, self._pushes, node))
        # Entries of nodes that were used again stay behind; rebuild before they outnumber the living.
        if len(self._heap) > 64 + 4 * self.n_nodes:
            self._heap = [(self._policy.priority(n), i, n) for i, n in enumerate(self.nodes()) if self._is_evictable(n)]
            heapq.heapify(self._heap)
            self._pushes = len(self._heap)

    def _remove(self, node: Node) -> None:
        level = self._level(node)
        del level[node.key]
        if node.parent is None and not level:
            del self._roots[node.identity]
        self.n_nodes -= 1
        self.n_cached -= 1
        release(node.page, self._arena)
        if node.parent is not None and node.parent.page.ref_count == 1:
            self._offer(node.parent)
