"""What goes first when pages run out, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.cache.radix import Node


class EvictionPolicy(Protocol):
    """Which of the pages that nobody reads goes first: that of the node with the lowest priority."""

    def priority(self, node: Node) -> float: ...


class LeastRecentlyUsed:
    """Evict what was last used longest ago."""

    def priority(self, node: Node) -> float:
        return float(node.last_used)


@dataclass(frozen=True, slots=True)
class Evicted:
    """A page that the tree is about to let go: page `node.depth` of every sequence that begins as the node's path.

    The node still stands where it stood, with the page in its slot.
    """

    node: Node
    group: int


class CacheObserver(Protocol):
    """Hears what becomes of published pages. Called between steps, on the engine's thread; must not call the cache."""

    def evicted(self, event: Evicted) -> None: ...
