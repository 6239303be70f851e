"""How many requests a minute a tenant may send."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.api.errors import ApiError


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class RateLimits:
    """A token bucket per tenant: it holds a minute's requests at most and is refilled evenly. For one event loop.

    So a tenant that was silent may send `rate` requests at once, and no more than 2 * rate in any minute.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, tenant: str, rate: int | None) -> None:
        """Count one request. `rate` is the tenant's present limit, in requests a minute; it may change at any time.

        Raises ApiError (429) when the bucket is empty; such a request is not counted.
        """
        if rate is None:
            self._buckets.pop(tenant, None)
            return
        now = self._clock()
        bucket = self._buckets.setdefault(tenant, _Bucket(float(rate), now))
        bucket.tokens = min(float(rate), bucket.tokens + (now - bucket.filled_at) * rate / 60)
        bucket.filled_at = now
        if bucket.tokens < 1:
            wait_s = max(1, math.ceil((1 - bucket.tokens) * 60 / rate))
            message = (
                f"the limit of the tenant {tenant} is {rate} requests a minute, and 0 are left; try again in {wait_s} s"
            )
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(wait_s)})
        bucket.tokens -= 1
