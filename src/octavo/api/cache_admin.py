"""What users may read of the cache: receipts, and what more memory would bring."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.context import ServerContext, context_of
from octavo.api.errors import ApiError, JsonResponse

router = APIRouter()


@router.get("/v1/cache/receipts/{request_id}")
async def get_receipt(request: Request, request_id: str) -> Response:
    """The receipts of one request, one for each of its prompts."""
    kept = context_of(request).receipts.find(_tenant(request), request_id)
    if kept is None:
        raise ApiError(404, f"no receipt is kept for a request {request_id!r}", code="not_found")
    return JsonResponse({"id": request_id, "receipts": kept})


@router.get("/v1/cache/what-if")
async def what_if(request: Request) -> Response:
    """The hit rate that more memory would have had, and how it is spread over requests."""
    context = context_of(request)
    return JsonResponse(await asyncio.to_thread(_what_if, context))


def _what_if(context: ServerContext) -> dict[str, Any]:
    report = context.engine.cache_report()
    return {
        "memory_bytes": context.engine.info.kv_memory_bytes,
        "hit_tokens": report.hit_tokens,
        "query_tokens": report.query_tokens,
        "curve": [{"memory": multiple, "hit_rate": rate} for multiple, rate in report.what_if],
        "hit_fraction_histogram": {
            tenant or "default": {"upper_bounds": [i / 10 for i in range(11)], "requests": list(bins)}
            for tenant, bins in report.hit_fractions.items()
        },
    }


def _tenant(request: Request) -> str:
    return ""
