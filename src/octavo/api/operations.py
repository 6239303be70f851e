"""GET /health and GET /metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.context import context_of
from octavo.api.errors import JsonResponse
from octavo.api.generation import engine_dead, shutting_down

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """200 while requests are taken; 503 when the engine has died or the server is shutting down. Needs no
    key."""
    context = context_of(request)
    if not context.engine.is_healthy():
        raise engine_dead()
    if context.generations.draining:
        raise shutting_down()
    return JsonResponse({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    exposition = await asyncio.to_thread(context_of(request).metrics.exposition)
    return Response(exposition, media_type=CONTENT_TYPE_LATEST)
