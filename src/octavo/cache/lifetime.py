"""How long published pages live."""

from __future__ import annotations

from dataclasses import dataclass

#: Never.
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Seconds, None for no limit.

    ttl_s: after its last hit a page lives for so long. max_age_s: and in all for so long, hits or not. A page's prefix
    lives at least as long as the page, and no page longer than the prefix may.
    """

    ttl_s: float | None = None
    max_age_s: float | None = None

    @property
    def is_limited(self) -> bool:
        return self.ttl_s is not None or self.max_age_s is not None

    def deadline(self, born: float, parent_deadline: float) -> float:
        """The last moment that a page may see; `born` and the result in the tree's clock."""
        return parent_deadline if self.max_age_s is None else min(born + self.max_age_s, parent_deadline)

    def expiry(self, now: float, deadline: float) -> float:
        """When a page that is used now expires."""
        return deadline if self.ttl_s is None else min(now + self.ttl_s, deadline)
