"""How much of the cache each tenant is promised, and how much it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Quota:
    """Bytes of pages. floor: what other tenants' requests cannot take. cap: what its own may take; None: all."""

    floor: int = 0
    cap: int | None = None


@dataclass(frozen=True, slots=True)
class Quotas:
    """By tenant; one that is not named has no floor and no cap."""

    of: Mapping[str, Quota] = field(default_factory=dict)

    def floor(self, tenant: str) -> int:
        return self.of[tenant].floor if tenant in self.of else 0

    def cap(self, tenant: str) -> int | None:
        return self.of[tenant].cap if tenant in self.of else None
