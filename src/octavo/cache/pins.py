"""Pins: prefixes that stay for a while whatever the pressure, within a limit that leaves room for everyone."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from octavo.cache.manager import KVCache
from octavo.cache.radix import PrefixIdentity
from octavo.cache.table import BlockTable
from octavo.errors import RequestError

I32 = NDArray[np.int32]

#: Pins of all tenants hold at most this share of the page budget, and those of one at most this share of its cap, so
#: that a newcomer finds room beside them; one that needs more, and is alone, has them give way.
MAX_SHARE = Fraction(1, 2)


@dataclass(frozen=True, slots=True)
class Pin:
    """Attributes:
    n_tokens: of the prefix, in whole pages. n_bytes: of its pages.
    expires_at: in seconds since 1970.
    """

    id: str
    tenant: str
    n_tokens: int
    n_bytes: int
    expires_at: float


@dataclass(slots=True)
class _Held:
    pin: Pin
    table: BlockTable
    until: float  # in the tree's clock


class Pins:
    """A pin is a block table that reads a prefix and computes nothing. One thread."""

    def __init__(self, cache: KVCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._now = clock
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, identity: PrefixIdentity, tokens: I32, ttl_s: float) -> Pin:
        """Pin the whole pages of `tokens` that are cached. The same prefix again is the same pin, kept for longer.

        Raises RequestError where nothing of it is cached, or pins hold what they may.
        """
        table = self._cache.new_table(identity)
        match = self._cache.match_prefix(table, tokens, len(tokens))
        try:
            if match.node is None:
                raise RequestError("no whole page of this prompt is cached, so there is nothing to pin", param="prompt")
            self._check_limits(table)
        except RequestError:
            self._cache.release(table)
            raise
        until = self._now() + ttl_s
        for held in self._held.values():
            if held.table.node is match.node:
                self._cache.release(table)
                held.until = max(held.until, until)
                break
        else:
            n_bytes = self._cache.holdings([table]).n_bytes
            pin = Pin("pin_" + secrets.token_hex(12), identity.tenant, match.n_tokens, n_bytes, 0.0)
            held = self._held[pin.id] = _Held(pin, table, until)
        self._cache.tree.keep(match.node, held.until)
        # Not past the greatest age of what it pins.
        left = min(held.until, match.node.expires_at) - self._now()
        held.pin = Pin(held.pin.id, held.pin.tenant, held.pin.n_tokens, held.pin.n_bytes, time.time() + left)
        return held.pin

    def remove(self, tenant: str, pin_id: str) -> Pin | None:
        """Let a tenant's pin go; None where it has none of this id. Its pages stay cached like any."""
        held = self._held.get(pin_id)
        if held is None or held.pin.tenant != tenant:
            return None
        del self._held[pin_id]
        self._cache.release(held.table, refresh=False)
        return held.pin

    def give_way(self, tenant: str | None = None) -> bool:
        """Let the pin go that expires first, of all or of one tenant's; False if there is none. For a request that can
        have its pages from nobody else."""
        own = [held for held in self._held.values() if tenant in (None, held.pin.tenant)]
        if not own:
            return False
        first = min(own, key=lambda held: held.until)
        return self.remove(first.pin.tenant, first.pin.id) is not None

    def expire(self) -> None:
        """Let go of pins whose time is over, or whose pages have left the tree."""
        now = self._now()
        for pin_id, held in list(self._held.items()):
            if held.until <= now or not held.table.publishes:
                self.remove(held.pin.tenant, pin_id)

    def erase(self, tenant: str, salt: str | None) -> None:
        for pin_id, held in list(self._held.items()):
            if held.pin.tenant == tenant and salt in (None, held.table.identity.salt):
                self.remove(tenant, pin_id)

    def of(self, tenant: str) -> list[Pin]:
        return [held.pin for held in self._held.values() if held.pin.tenant == tenant]

    def _check_limits(self, table: BlockTable) -> None:
        cache, tenant = self._cache, table.identity.tenant
        cap = cache.quotas.cap(tenant)
        everyone = [held.table for held in self._held.values()]
        own = [t for t in everyone if t.identity.tenant == tenant]
        for tables, limit, whose in (
            (everyone, int(MAX_SHARE * cache.footprint.arena_bytes), "all pins"),
            (own, None if cap is None else int(MAX_SHARE * cap), "this tenant's pins"),
        ):
            wanted = cache.holdings([*tables, table]).n_bytes
            if limit is not None and wanted > limit:
                raise RequestError(
                    f"{whose} would hold {wanted:,} bytes, and may hold {limit:,} at most; pin less, or let others go",
                    param="prompt",
                    code="pin_limit_exceeded",
                )
