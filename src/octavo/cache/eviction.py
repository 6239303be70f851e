"""What goes first when pages run out, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from octavo.cache.radix import Node


class EvictionPolicy(Protocol):
    """Which of the pages that nobody reads goes first: that of the node with the lowest priority."""

    name: str

    def priority(self, node: Node) -> float: ...


class LeastRecentlyUsed:
    """Evict what was last used longest ago."""

    name = "lru"

    def priority(self, node: Node) -> float:
        return float(node.last_used)


#: Why a page goes: for want of memory, because its time is over, or because its owner says so.
EvictionReason = Literal["evicted", "expired", "erased"]


@dataclass(frozen=True, slots=True)
class Evicted:
    """A page that the tree is about to let go: page `node.depth` of every sequence that begins as the node's path.

    The node still stands where it stood, with the page in its slot.
    """

    node: Node
    group: int
    reason: EvictionReason = "evicted"


class CacheObserver(Protocol):
    """Hears what becomes of published pages. Called between steps, on the engine's thread; must not call the cache."""

    def evicted(self, event: Evicted) -> None: ...
