"""What users may read of the cache, and erase of it."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import Caller, caller_of
from octavo.api.context import ServerContext, context_of
from octavo.api.errors import ApiError, JsonResponse
from octavo.api.generation import collect, while_connected
from octavo.api.openai_completions import encode_prompts
from octavo.api.schemas.utility import PinRequest
from octavo.cache.pins import Pin
from octavo.cache.policy import ADMIN_TENANT, DEFAULT_TENANT
from octavo.engine.messages import GenerateRequest, SamplingParams

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


@router.post("/v1/cache/pins")
async def add_pin(request: Request) -> Response:
    """Keep a prompt's whole pages for a while, whatever the pressure; computed first where they are not cached."""
    context, caller = context_of(request), caller_of(request)
    body = await context.read(request, PinRequest)
    context.check_model(body.model)
    ttl_s = body.ttl_s()
    return await while_connected(request.receive, _pin(context, caller, body, ttl_s))


async def _pin(context: ServerContext, caller: Caller, body: PinRequest, ttl_s: float) -> Response:
    (prompt,) = await asyncio.to_thread(encode_prompts, context.engine.tokenizer, [body.prompt], True)
    # Computes what is not cached, and nothing beyond the prompt.
    params = SamplingParams(max_tokens=0)
    compute = GenerateRequest(f"pin-{uuid.uuid4().hex}", prompt.token_ids, params, "", caller.tenant)
    with context.generations.open([compute]) as generation:
        (answer,) = (await collect(generation)).values()
    assert answer.finished is not None
    receipt = context.issue_receipt(caller.tenant, compute.request_id, [answer.finished])
    pin = await asyncio.to_thread(context.engine.pin, caller.tenant, "", prompt.token_ids, ttl_s)
    return JsonResponse({**_pin_object(pin), "cache": receipt})


@router.delete("/v1/cache/pins/{pin_id}")
async def delete_pin(request: Request, pin_id: str) -> Response:
    """Let a pin go: its pages stay cached as any, and go when room is needed."""
    context, caller = context_of(request), caller_of(request)
    pin = await asyncio.to_thread(context.engine.unpin, caller.tenant, pin_id)
    if pin is None:
        raise ApiError(404, f"there is no pin {pin_id!r}", code="not_found")
    return JsonResponse({**_pin_object(pin), "deleted": True})


def _pin_object(pin: Pin) -> dict[str, Any]:
    return {
        "id": pin.id,
        "object": "cache.pin",
        "tokens": pin.n_tokens,
        "bytes": pin.n_bytes,
        "expires_at": pin.expires_at,
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
