"""What is gone: keyed fingerprints of pages that the tree has let go, so that a miss can say why, and what more memory
would have kept. No tokens, no text.

A page's fingerprint is a keyed hash (BLAKE2b with the tenant's key) over its identity and all token ids up to its end;
without the key it says nothing, so destroying a tenant's key erases the tenant's ghosts.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cache.eviction import Evicted
from octavo.cache.radix import Node, PrefixIdentity
from octavo.cache.receipt import MissReason

#: Sizes of memory, as multiples of today's, for which the what-if curve says a hit rate.
WHAT_IF = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


@dataclass(frozen=True, slots=True)
class Ghost:
    """`at_bytes`: how many bytes had been evicted in all when this page went."""

    reason: MissReason
    at_bytes: int


class Ghosts:
    """A bounded list. Implements `octavo.cache.eviction.CacheObserver`.

    Args:
        capacity: fingerprints kept at most, those of the longest gone pages going first.
        page_bytes: bytes of a page over all groups.
        page_size: tokens of a page.
        memory_bytes: size of the arena, the what-if curve's 1.
    """

    def __init__(self, capacity: int, page_bytes: int, page_size: int, memory_bytes: int) -> None:
        self._capacity = capacity
        self._page_bytes = page_bytes
        self._page_size = page_size
        self._memory_bytes = memory_bytes
        self._keys: dict[str, bytes] = {}
        self._gone: OrderedDict[bytes, Ghost] = OrderedDict()
        self._evicted_bytes = 0
        #: Tokens that were missed but would have hit, by the least multiple of memory in WHAT_IF that had kept them.
        self._missed = [0] * len(WHAT_IF)

    def __len__(self) -> int:
        return len(self._gone)

    def evicted(self, event: Evicted) -> None:
        if event.group:
            return  # a page is one fingerprint, however many groups it has
        self._evicted_bytes += self._page_bytes
        name = self._name_of(event.node)
        self._gone.pop(name, None)
        self._gone[name] = Ghost(event.reason, self._evicted_bytes)
        if len(self._gone) > self._capacity:
            self._gone.popitem(last=False)

    def look(self, identity: PrefixIdentity, node: Node | None, pages: Sequence[bytes]) -> MissReason | None:
        """Why the first of `pages` (token ids of the pages that follow `node` in a prompt) is gone, None if it was
        never there. Counts what more memory would have kept of them."""
        if not self._gone or identity.tenant not in self._keys:
            return None
        name = self._root(identity) if node is None else self._name_of(node)
        reason: MissReason | None = None
        furthest = 0
        for page in pages:
            name = self._next(identity.tenant, name, page)
            ghost = self._gone.get(name)
            if ghost is None:
                break
            reason = reason or ghost.reason
            if ghost.reason != "evicted":
                break  # more memory would not have kept it
            # A page helps only with all before it.
            furthest = max(furthest, self._evicted_bytes - ghost.at_bytes + self._page_bytes)
            needed = 1 + furthest / self._memory_bytes
            for i, multiple in enumerate(WHAT_IF):
                if needed <= multiple:
                    self._missed[i] += self._page_size
                    break
        return reason

    def forget_tenant(self, tenant: str) -> int:
        """Destroy the tenant's key, so that its fingerprints can no longer be told from random bytes; how many keys
        there were."""
        return 0 if self._keys.pop(tenant, None) is None else 1

    def what_if(self, hit_tokens: int, query_tokens: int) -> list[tuple[float, float]]:
        """(multiple of memory, hit rate that it would have had so far), rising. An upper bound on what is needed: pages
        that came back meanwhile are counted as if they took memory twice."""
        curve, kept = [], hit_tokens
        for multiple, missed in zip(WHAT_IF, self._missed, strict=True):
            kept += missed
            curve.append((multiple, kept / query_tokens if query_tokens else 0.0))
        return curve

    def _name_of(self, node: Node) -> bytes:
        path = [node]
        while path[-1].name is None and path[-1].parent is not None:
            path.append(path[-1].parent)
        for one in reversed(path):
            if one.name is None:
                before = self._root(one.identity) if one.parent is None else one.parent.name
                assert before is not None
                one.name = self._next(one.identity.tenant, before, one.key)
        assert node.name is not None
        return node.name

    def _root(self, identity: PrefixIdentity) -> bytes:
        return hashlib.blake2b(json.dumps(identity).encode(), key=self._key(identity.tenant), digest_size=16).digest()

    def _next(self, tenant: str, name: bytes, page: bytes) -> bytes:
        return hashlib.blake2b(name + page, key=self._key(tenant), digest_size=16).digest()

    def _key(self, tenant: str) -> bytes:
        return self._keys.setdefault(tenant, secrets.token_bytes(32))
