"""The prefix tree: which sealed pages can serve the beginning of a prompt.

Page-granular: an edge is the token ids of one page, compared as bytes, never only hashed. Below one root, the path from
the root to a node spells everything that a page's content depends on.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from octavo.cache.arena import Arena, PageHandle
from octavo.cache.eviction import CacheObserver, Evicted, EvictionPolicy, EvictionReason, LeastRecentlyUsed
from octavo.cache.lifetime import NEVER, Lifetime
from octavo.cache.spec import CacheGroup

#: An expired page that cannot go yet, since a running request reads it, is looked at again after so long.
RETRY_EXPIRY_S = 1.0


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
    #: Whose pages these are, and a division of them that the tenant's client has made.
    tenant: str
    salt: str


@dataclass(frozen=True, slots=True)
class Resident:
    """A page in the arena."""

    handle: PageHandle


@dataclass(frozen=True, slots=True)
class Lower:
    """A page in a lower tier, under the tier's own name for it."""

    tier: str
    key: bytes


#: Where a node's page of one group is. None: nowhere; the node stays, for its other groups and its children.
Slot = Resident | Lower | None


@dataclass(slots=True, eq=False)
class Node:
    """One published page of a prefix, in every group.

    Attributes:
        key: its token ids as little-endian int32 bytes.
        depth: its page's index in the sequence.
        slots: where its page is, for each group.
        lock_count: block tables whose published pages end here. A locked node stays, and so do those above it.
        name: a keyed fingerprint of the path to here, once somebody (the ghost list) has asked for one.
        expires_at: when it can no longer be matched, in the tree's clock; not after `deadline`, not before a child's.
        is_cut_off: whether it was taken out of the tree while somebody read it. It gets no children any more.
    """

    key: bytes
    depth: int
    parent: Node | None
    identity: PrefixIdentity
    slots: list[Slot]
    children: dict[bytes, Node] = field(default_factory=dict)
    lock_count: int = 0
    last_used: int = 0
    name: bytes | None = None
    expires_at: float = NEVER
    deadline: float = NEVER
    is_cut_off: bool = False


@dataclass(frozen=True, slots=True)
class MatchEnd:
    """Why a prefix match went no further than `at_token`.

    reason: "limit": all that was asked for is there. "cold": nothing that begins so was ever published, or it is gone.
    "diverged": what is published goes on with other tokens. "published_end": what is published ends here.
    "missing": `group` lacks pages that a longer hit would read. "expired": what comes next has outlived its time.
    """

    reason: Literal["limit", "cold", "diverged", "published_end", "missing", "expired"]
    at_token: int
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix that every group can serve.

    Attributes:
        path: its nodes from the root on.
        n_tokens: tokens that they hold.
        end: where and why it ended.
    """

    path: tuple[Node, ...]
    n_tokens: int
    end: MatchEnd

    @property
    def node(self) -> Node | None:
        return self.path[-1] if self.path else None


@dataclass(frozen=True, slots=True)
class Inserted:
    """The node for a page's content, and for each group the page to use from now on: the one that was published before,
    where there was one."""

    node: Node
    handles: tuple[PageHandle, ...]


#: (priority, number of the push, node, group whose slot alone may go, or None for the whole node).
_Candidate = tuple[float, int, Node, int | None]


@dataclass(frozen=True, slots=True)
class Erasure:
    """Pages that were unpublished, their bytes, and how many of them are still read by running requests: these are
    zeroed when the last of those ends."""

    pages: int
    n_bytes: int
    pending: int

    def plus(self, other: Erasure) -> Erasure:
        return Erasure(self.pages + other.pages, self.n_bytes + other.n_bytes, self.pending + other.pending)


class PrefixTree:
    """Published pages by content.

    Rules:
    - The tree is a holder of every resident page in its slots; a block table that reads a page is another. A page with
      the tree as its only holder is cached and may be evicted.
    - Where a group serves from leaves, pages go from the leaves on, together with their nodes. Elsewhere a slot may be
      emptied anywhere.
    - `lock` a match's last node before anything else may evict, and hold the pages that are read.
    """

    def __init__(
        self,
        arena: Arena,
        groups: Sequence[CacheGroup],
        page_size: int,
        policy: EvictionPolicy | None = None,
        observer: CacheObserver | None = None,
        lifetime: Lifetime | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = arena
        self.lifetime = lifetime or Lifetime()
        self._now = clock
        #: (expiry when pushed, number of the push, node).
        self._expiries: list[tuple[float, int, Node]] = []
        self._groups = tuple(groups)
        self._page_size = page_size
        self.policy = policy or LeastRecentlyUsed()
        self._observer = observer
        self._roots: dict[PrefixIdentity, dict[bytes, Node]] = {}
        #: For each tenant, what may be evicted of it.
        self._heaps: dict[str, list[_Candidate]] = {}
        self._clock = 0
        self._pushes = 0
        self.n_nodes = 0
        self.evicted_pages = 0
        #: Changes whenever a match may come out differently.
        self.version = 0

    def match_prefix(self, identity: PrefixIdentity, tokens: bytes, max_pages: int) -> Match:
        """The longest prefix of `tokens` (int32 bytes) that every group can serve, at most max_pages."""
        path: list[Node] = []
        level = self._roots.get(identity, {})
        width, now = 4 * self._page_size, self._now()
        for i in range(max_pages):
            node = level.get(tokens[i * width : (i + 1) * width])
            if node is None:
                break
            if node.expires_at <= now:
                return self._servable(path, MatchEnd("expired", i * self._page_size))
            path.append(node)
            level = node.children
        return self._servable(path, self._end(len(path), max_pages, more=bool(level)))

    def _end(self, n: int, max_pages: int, *, more: bool) -> MatchEnd:
        at = n * self._page_size
        if n == max_pages:
            return MatchEnd("limit", at)
        if more:
            return MatchEnd("diverged", at)
        return MatchEnd("published_end" if n else "cold", at)

    def _servable(self, path: list[Node], end: MatchEnd) -> Match:
        """Cut a path back until every group can serve it."""
        n = -1
        while n != len(path):
            n = len(path)
            for g, group in enumerate(self._groups):
                served = group.servable([isinstance(node.slots[g], Resident) for node in path], self._page_size)
                if served < len(path):
                    del path[served:]
                    end = MatchEnd("missing", served * self._page_size, group.name)
        return Match(tuple(path), n * self._page_size, end)

    def lock(self, node: Node) -> None:
        """A table's published pages end here."""
        node.lock_count += 1
        self._clock += 1
        node.last_used = self._clock

    def unlock(self, node: Node) -> None:
        """A table that ended here goes on, or is gone."""
        if node.lock_count < 1:
            raise ValueError("unlocked a node that no table holds")
        node.lock_count -= 1
        self._clock += 1
        node.last_used = self._clock
        self._offer(node)

    def touch(self, node: Node) -> None:
        """A path was used as far as this node: its time to live begins anew."""
        if node.expires_at == NEVER and (node.parent is None or node.parent.expires_at == NEVER):
            return
        now = self._now()
        one: Node | None = node
        least = 0.0
        while one is not None:
            expiry = max(self.lifetime.expiry(now, one.deadline), one.expires_at, least)
            if one is not node and one.expires_at >= expiry:
                break  # what is above has as long to live already, for another path
            one.expires_at = least = expiry
            one = one.parent

    def keep(self, node: Node, until: float) -> None:
        """A path as far as this node does not expire before `until`, or its deadline."""
        one: Node | None = node
        while one is not None and one.expires_at < until:
            one.expires_at = max(one.expires_at, min(until, one.deadline))
            one = one.parent

    def expire(self, limit: int = 64) -> int:
        """Let go of pages whose time is over, looking at no more than `limit`; how many went.

        A path that a running request reads stays until the request ends, but none passes its deadline.
        """
        now, before = self._now(), self.evicted_pages
        for _ in range(limit):
            if not self._expiries or self._expiries[0][0] > now:
                break
            _, _, node = heapq.heappop(self._expiries)
            if node.is_cut_off or self._level(node).get(node.key) is not node:
                continue
            if node.expires_at > now:
                self._watch(node, node.expires_at)
            elif node.deadline <= now:
                self._cut_off(node, "expired")
            elif node.children or node.lock_count:
                self._watch(node, now + RETRY_EXPIRY_S)
            else:
                over: Node | None = node
                while over is not None and over.expires_at <= now and not over.children and not over.lock_count:
                    self._remove(over, "expired")
                    over = over.parent
        return self.evicted_pages - before

    def erase(self, tenant: str, salt: str | None = None) -> Erasure:
        """Unpublish all of a tenant's pages (of one salt, if one is given) at once. Their bytes are zeroed when the
        last reader lets go; those that somebody still reads are counted as pending."""
        total = Erasure(0, 0, 0)
        for identity in [i for i in self._roots if i.tenant == tenant and salt in (None, i.salt)]:
            for node in list(self._roots[identity].values()):
                total = total.plus(self._cut_off(node, "erased"))
        return total

    def insert(
        self, identity: PrefixIdentity, parent: Node | None, key: bytes, handles: Sequence[PageHandle]
    ) -> Inserted:
        """Publish one page of each group, which the caller holds, below `parent` (None: at the root).

        Where the content was published before with its pages in place, those are the ones to use; the caller moves its
        holds to them. Otherwise the tree becomes a holder of the caller's.
        """
        level = self._roots.setdefault(identity, {}) if parent is None else parent.children
        node = level.get(key)
        if node is not None and node.deadline <= self._now():
            self._cut_off(node, "expired")
            node = None
            level = self._roots.setdefault(identity, {}) if parent is None else parent.children
        if node is None:
            node = Node(key, 0 if parent is None else parent.depth + 1, parent, identity, [None] * len(self._groups))
            level[key] = node
            self.n_nodes += 1
            now = self._now()
            node.deadline = self.lifetime.deadline(now, NEVER if parent is None else parent.deadline)
            node.expires_at = self.lifetime.expiry(now, node.deadline)
            if node.expires_at < NEVER:
                self._watch(node, node.expires_at)
        self.touch(node)
        used = []
        for g, handle in enumerate(handles):
            slot = node.slots[g]
            if not isinstance(slot, Resident):
                slot = node.slots[g] = Resident(handle)
                self._arena.publish(handle)
                self.version += 1
            used.append(slot.handle)
        return Inserted(node, tuple(used))

    def passed(self, node: Node, group: int) -> None:
        """A table no longer reads this node's page of a group that may lose pages anywhere (it is behind a window)."""
        if not self._groups[group].serves_from_leaves:
            self._push(node, group)

    def evict_one(self, may_take: Callable[[str], bool] | None = None) -> bool:
        """Let the cached page with the lowest priority go, with what only it made useful; False if there is none.

        may_take: which tenants' pages may go; None: everybody's.
        """
        while True:
            best: tuple[float, int, str] | None = None
            for tenant in list(self._heaps):
                if may_take is None or may_take(tenant):
                    top = self._top(tenant)
                    if top is not None and (best is None or (top[0], top[1], tenant) < best):
                        best = (top[0], top[1], tenant)
            if best is None:
                return False
            _, _, node, group = heapq.heappop(self._heaps[best[2]])
            before = self.evicted_pages
            if group is None:
                self._remove(node)
            else:
                self._empty(node, group)
                self._offer(node)
            if self.evicted_pages > before:
                return True

    def _top(self, tenant: str) -> _Candidate | None:
        """The tenant's candidate with the lowest priority, after what is none any more has been put away."""
        heap = self._heaps[tenant]
        while heap:
            priority, _, node, group = heap[0]
            if self._is_evictable(node, group):
                if self.policy.priority(node) == priority:
                    return heap[0]
                heapq.heappop(heap)
                self._push(node, group)
            else:
                heapq.heappop(heap)
        del self._heaps[tenant]
        return None

    def clear(self) -> None:
        """Evict everything that no table holds."""
        while self.evict_one():
            pass

    def level(self, identity: PrefixIdentity, node: Node | None) -> Mapping[bytes, Node]:
        """What is published right behind `node`; at the root if None."""
        return self._roots.get(identity, {}) if node is None else node.children

    def identities(self) -> Iterator[PrefixIdentity]:
        """Of all that is published."""
        return iter(self._roots)

    def nodes(self) -> Iterator[Node]:
        stack = [n for level in self._roots.values() for n in level.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _is_evictable(self, node: Node, group: int | None) -> bool:
        if node.is_cut_off or self._level(node).get(node.key) is not node:
            return False
        if group is None:
            return not node.children and node.lock_count == 0
        slot = node.slots[group]
        return isinstance(slot, Resident) and self._arena.ref_count[slot.handle] == 1

    def _level(self, node: Node) -> dict[bytes, Node]:
        return self._roots.get(node.identity, {}) if node.parent is None else node.parent.children

    def _offer(self, node: Node) -> None:
        """Make what may now be evicted of a node known to the heap."""
        if node.is_cut_off:
            return
        if not node.children and node.lock_count == 0:
            self._push(node, None)
        for g in range(len(self._groups)):
            self.passed(node, g)

    def _push(self, node: Node, group: int | None) -> None:
        self._pushes += 1
        tenant = node.identity.tenant
        heap = self._heaps.setdefault(tenant, [])
        heapq.heappush(heap, (self.policy.priority(node), self._pushes, node, group))
        # Entries of nodes that were used again stay behind; rebuild before they outnumber the living.
        if len(heap) > 64 + 4 * self.n_nodes * (1 + len(self._groups)):
            everything = (None, *(g for g, group in enumerate(self._groups) if not group.serves_from_leaves))
            own = (n for n in self.nodes() if n.identity.tenant == tenant)
            candidates = [(n, g) for n in own for g in everything if self._is_evictable(n, g)]
            heap[:] = [(self.policy.priority(n), i - len(candidates), n, g) for i, (n, g) in enumerate(candidates)]
            heapq.heapify(heap)

    def _cut_off(self, node: Node, reason: EvictionReason) -> Erasure:
        """Take a node and all behind it out of the tree, whoever may be reading it."""
        level = self._level(node)
        del level[node.key]
        if node.parent is None and not level:
            del self._roots[node.identity]
        total = Erasure(0, 0, 0)
        stack = [node]
        while stack:
            one = stack.pop()
            stack.extend(one.children.values())
            one.children = {}
            one.is_cut_off = True
            self.n_nodes -= 1
            for g, slot in enumerate(one.slots):
                if isinstance(slot, Resident):
                    n_bytes, is_read = self._arena.page_bytes(slot.handle), self._arena.ref_count[slot.handle] > 1
                    total = total.plus(Erasure(1, n_bytes, int(is_read)))
                    self._empty(one, g, reason)
        if node.parent is not None:
            self._offer(node.parent)
        return total

    def _watch(self, node: Node, until: float) -> None:
        self._pushes += 1
        heapq.heappush(self._expiries, (until, self._pushes, node))
        # Entries of nodes that are gone stay behind; rebuild before they outnumber the living.
        if len(self._expiries) > 64 + 4 * self.n_nodes:
            living = (n for n in self.nodes() if n.expires_at < NEVER)
            self._expiries = [(n.expires_at, i, n) for i, n in enumerate(living)]
            heapq.heapify(self._expiries)

    def _empty(self, node: Node, group: int, reason: EvictionReason = "evicted") -> None:
        """The tree lets go of a node's page. What is over or erased leaves no bytes behind."""
        slot = node.slots[group]
        if not isinstance(slot, Resident):
            return
        if self._observer is not None:
            self._observer.evicted(Evicted(node, group, reason))
        node.slots[group] = None
        if reason != "evicted":
            self._arena.zero_when_freed(np.array([slot.handle], dtype=np.int64))
        self._arena.unpublish(slot.handle)
        self.evicted_pages += 1
        self.version += 1

    def _remove(self, node: Node, reason: EvictionReason = "evicted") -> None:
        for g in range(len(self._groups)):
            self._empty(node, g, reason)
        level = self._level(node)
        del level[node.key]
        if node.parent is None and not level:
            del self._roots[node.identity]
        self.n_nodes -= 1
        if node.parent is not None:
            # Its path was used whenever it was.
            node.parent.last_used = max(node.parent.last_used, node.last_used)
            self._offer(node.parent)
