"""GET /v1/cache/policy: the contract in force, as far as it concerns whoever asks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypedDict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import Caller, caller_of
from octavo.api.context import context_of
from octavo.api.contract import InForce, content_hash
from octavo.api.errors import JsonResponse, encode_json
from octavo.cache.policy import Policy, Prices, Size, TenantPolicy

router = APIRouter()


class GeneralView(TypedDict):
    key_codec: str
    value_codec: str
    ladder: list[str]
    at_cap: str
    session_cap: str | None


class LifetimeView(TypedDict):
    """In seconds; None: no limit."""

    ttl_s: float | None
    max_age_s: float | None


class PruningView(TypedDict):
    method: str | None
    budget: str | None


class PricesView(TypedDict):
    """Per million tokens, as decimal strings: they are exact."""

    currency: str
    cached: str
    computed: str
    output: str


class PoolView(TypedDict):
    share: float
    step_tokens: int | None
    min_tokens: int


class TenantView(TypedDict):
    """Sizes as they are written: "512MiB", "25%". The rate is in requests a minute."""

    floor: str | None
    cap: str | None
    session_cap: str | None
    rate: int | None


class PublicView(TypedDict):
    prefix: str


class PolicyView(TypedDict):
    """The tables of the policy file, without its keys. `tenants` holds the caller's own; an admin's holds all."""

    policy: GeneralView
    lifetime: LifetimeView
    pruning: PruningView
    prices: PricesView | None
    pools: dict[str, PoolView]
    tenants: dict[str, TenantView]
    public: list[PublicView]


@router.get("/v1/cache/policy")
async def cache_policy(request: Request) -> Response:
    now = context_of(request).contract.now
    caller = caller_of(request)
    view = policy_view(now.policy, caller)
    loaded_at = datetime.fromtimestamp(now.loaded_at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return JsonResponse({"version": _version(now, caller, view), "loaded_at": loaded_at, **view})


def _version(now: InForce, caller: Caller, view: PolicyView) -> str:
    """An admin's is that of the file. A tenant's is that of what it sees: it must not tell it of changes to others."""
    return now.version if caller.is_admin and now.version else content_hash(encode_json(view).decode())


def policy_view(policy: Policy, caller: Caller) -> PolicyView:
    names = list(policy.tenants) if caller.is_admin else [caller.tenant]
    return {
        "policy": {
            "key_codec": policy.key_codec,
            "value_codec": policy.value_codec,
            "ladder": list(policy.ladder),
            "at_cap": policy.at_cap,
            "session_cap": _size(policy.session_cap),
        },
        "lifetime": {"ttl_s": policy.lifetime.ttl_s, "max_age_s": policy.lifetime.max_age_s},
        "pruning": {"method": policy.pruning.method, "budget": _size(policy.pruning.budget)},
        "prices": None if policy.prices is None else _prices(policy.prices),
        "pools": {
            name: {"share": float(pool.share), "step_tokens": pool.step_tokens, "min_tokens": pool.min_tokens}
            for name, pool in policy.pools.items()
        },
        "tenants": {name: _tenant(policy.tenant(name)) for name in names},
        "public": [{"prefix": prefix} for prefix in policy.public_prefixes],
    }


def _prices(prices: Prices) -> PricesView:
    return {
        "currency": prices.currency,
        "cached": f"{prices.cached:f}",
        "computed": f"{prices.computed:f}",
        "output": f"{prices.output:f}",
    }


def _tenant(tenant: TenantPolicy) -> TenantView:
    return {
        "floor": _size(tenant.floor),
        "cap": _size(tenant.cap),
        "session_cap": _size(tenant.session_cap),
        "rate": tenant.rate,
    }


def _size(size: Size | None) -> str | None:
    return None if size is None else size.text
