"""What users may read of the cache, and erase of it."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import Caller, caller_of
from octavo.api.context import ServerContext, context_of
from octavo.api.errors import ApiError, JsonResponse
from octavo.cache.policy import ADMIN_TENANT, DEFAULT_TENANT

router = APIRouter()


@router.get("/v1/cache/receipts/{request_id}")
async def get_receipt(request: Request, request_id: str) -> Response:
    """The receipts of one request, one for each of its prompts."""
    kept = context_of(request).receipts.find(caller_of(request).tenant, request_id)
    if kept is None:
        raise ApiError(404, f"no receipt is kept for a request {request_id!r}", code="not_found")
    return JsonResponse({"id": request_id, "receipts": kept})


@router.get("/v1/cache/what-if")
async def what_if(request: Request) -> Response:
    """The hit rate that more memory would have had, and how it is spread over requests."""
    context = context_of(request)
    return JsonResponse(await asyncio.to_thread(_what_if, context, caller_of(request)))


def _what_if(context: ServerContext, caller: Caller) -> dict[str, Any]:
    report = context.engine.cache_report()
    own = {t: bins for t, bins in report.hit_fractions.items() if caller.is_admin or t == caller.tenant}
    histogram = {
        tenant: {"upper_bounds": [i / 10 for i in range(11)], "requests": list(bins)} for tenant, bins in own.items()
    }
    if not caller.is_admin:
        return {"hit_fraction_histogram": histogram}  # the curve is made of everybody's requests
    return {
        "memory_bytes": context.engine.info.kv_memory_bytes,
        "hit_tokens": report.hit_tokens,
        "query_tokens": report.query_tokens,
        "curve": [{"memory": multiple, "hit_rate": rate} for multiple, rate in report.what_if],
        "hit_fraction_histogram": histogram,
    }


@router.delete("/v1/tenants/{tenant}/cache")
async def erase(request: Request, tenant: str) -> Response:
    """Erase what the cache holds of a tenant: an admin anybody's, a tenant its own."""
    context, caller = context_of(request), caller_of(request)
    known = tenant in (caller.tenant, DEFAULT_TENANT, ADMIN_TENANT, *context.contract.now.policy.tenants)
    if not known or not (caller.is_admin or caller.tenant == tenant):
        raise ApiError(404, f"there is no tenant {tenant!r}", code="not_found")
    report = await asyncio.to_thread(context.engine.erase, tenant)
    receipts = context.receipts.erase(tenant)
    why = "requests that run go on to their answers; what they hold is zeroed when the last of them ends"
    pending = {"pages": report.pending, "requests": report.requests, "why": why if report.requests else None}
    return JsonResponse(
        {
            "object": "cache.erasure",
            "tenant": tenant,
            "pages": {"memory": report.pages, "disk": 0},
            "bytes": {"memory": report.n_bytes, "disk": 0},
            "keys_destroyed": report.keys,
            "receipts": receipts,
            "pending": pending,
            "shared": {"pages": 0, "until": None},
        }
    )
