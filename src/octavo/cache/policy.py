"""The cache contract as data: what an operator promises about codecs, lifetimes, prices, pools and tenants.

Plain values without behaviour; `policy_file` reads and checks them. Secrets are SHA-256 digests and stay out of
every repr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, TypeVar

from octavo.cache.lifetime import Lifetime
from octavo.cache.quotas import Quota, Quotas

AtCap = Literal["reject", "reseal", "summarize", "evict"]

#: The tenant of requests without a policy's key: those of an open server, and those with a key of --api-key-file.
DEFAULT_TENANT = "default"
#: The tenant under which admin keys generate.
ADMIN_TENANT = "admin"

Value = TypeVar("Value")


def _none() -> Mapping[str, Value]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Size:
    """An amount of the page budget, as bytes or as a share of it; one of the two is None.

    Attributes:
        text: as it was written.
        n_bytes: at least 1.
        share: above 0, at most 1.
    """

    text: str
    n_bytes: int | None = None
    share: Fraction | None = None

    def of(self, budget_bytes: int) -> int:
        """Bytes, where the page budget has `budget_bytes`; a share is rounded down."""
        if self.share is not None:
            return int(self.share * budget_bytes)
        assert self.n_bytes is not None
        return self.n_bytes


@dataclass(frozen=True, slots=True)
class Pruning:
    """Which tokens may be forgotten: the method's name, and how much of a sequence it keeps."""

    method: str | None = None
    budget: Size | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per million tokens, exact.

    Attributes:
        currency: three capital letters (ISO 4217).
        cached, computed: of a prompt token that was found in the cache, or had to be computed.
        output: of a generated token.
    """

    currency: str
    cached: Decimal
    computed: Decimal
    output: Decimal


@dataclass(frozen=True, slots=True)
class Pool:
    """A class of requests with a budget of its own.

    Attributes:
        share: of the page budget, above 0, at most 1.
        step_tokens: tokens of it that a step computes at most; None: as many as the engine does.
        min_tokens: requests with so many prompt tokens belong here, unless a pool with a higher threshold takes them.
    """

    share: Fraction
    step_tokens: int | None = None
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What one tenant is promised and allowed.

    Attributes:
        keys: SHA-256 digests of its API keys, 32 bytes each.
        floor: memory that other tenants' requests cannot take from it.
        cap: memory that its pages take at most.
        session_cap: memory that one of its sessions takes at most; None: the policy's own.
        rate: requests a minute; None: any number.
    """

    keys: tuple[bytes, ...] = field(default=(), repr=False)
    floor: Size | None = None
    cap: Size | None = None
    session_cap: Size | None = None
    rate: int | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """The contract in force. The default one is a server's without a policy file.

    Attributes:
        key_codec, value_codec: how sealed pages are written.
        ladder: codecs that old pages may be resealed through, each coarser than the one before; empty: none.
        at_cap: what becomes of a request that would take its tenant or session beyond a cap.
        session_cap: memory that one session takes at most, for tenants that name none themselves.
        pools, tenants: by name, in the file's order.
        admin_keys: SHA-256 digests, 32 bytes each.
        public_prefixes: texts whose pages all tenants share.
    """

    key_codec: str = "int8"
    value_codec: str = "int8"
    ladder: tuple[str, ...] = ()
    at_cap: AtCap = "reject"
    session_cap: Size | None = None
    lifetime: Lifetime = field(default_factory=Lifetime)
    pruning: Pruning = Pruning()
    prices: Prices | None = None
    pools: Mapping[str, Pool] = field(default_factory=_none)
    tenants: Mapping[str, TenantPolicy] = field(default_factory=_none)
    admin_keys: tuple[bytes, ...] = field(default=(), repr=False)
    public_prefixes: tuple[str, ...] = ()

    @property
    def has_keys(self) -> bool:
        return bool(self.admin_keys) or any(tenant.keys for tenant in self.tenants.values())

    def quotas(self, budget_bytes: int) -> Quotas:
        """Floors and caps in bytes, of a page budget of `budget_bytes`."""
        return Quotas(
            {
                name: Quota(
                    0 if tenant.floor is None else tenant.floor.of(budget_bytes),
                    None if tenant.cap is None else tenant.cap.of(budget_bytes),
                )
                for name, tenant in self.tenants.items()
            }
        )

    def tenant(self, name: str) -> TenantPolicy:
        """A tenant that the file does not name has no limits."""
        return self.tenants.get(name, _UNNAMED)


_UNNAMED = TenantPolicy()
