"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Literal, TypedDict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.context import ServerContext, context_of
from octavo.api.errors import JsonResponse

router = APIRouter()


class ModelObject(TypedDict):
    """OpenAI's shape, and vLLM's `root` and `max_model_len`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    context = context_of(request)
    return JsonResponse({"object": "list", "data": [_model(context, name) for name in context.model_names]})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    context = context_of(request)
    context.check_model(name)
    return JsonResponse(_model(context, name))


def _model(context: ServerContext, name: str) -> ModelObject:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": context.engine.info.model_name,
        "max_model_len": context.engine.info.max_model_len,
    }
