"""GET / and the page's own files, and the feed that it draws the cache from.

The files are static, hold no secret and need no key; the page asks for one. The feed needs it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.context import context_of
from octavo.api.errors import ApiError, JsonResponse, shorten
from octavo.api.generation import while_connected
from octavo.api.streaming import EventStreamResponse

router = APIRouter()

_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

_HEADERS: Final = {
    # Nothing from elsewhere, nothing inline, no framing.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    # Checked each time, so that a page never outlives the server that it belongs to.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str
    etag: str


def _load() -> dict[str, Asset]:
    assets = {}
    for file in files("octavo.api.dashboard").joinpath("static").iterdir():
        suffix = file.name.rpartition(".")[2]
        if suffix in _TYPES:
            body = file.read_bytes()
            assets[file.name] = Asset(body, _TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return assets


_ASSETS: Final = _load()


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return _serve(request, "index.html")


@router.api_route("/favicon.ico", methods=["GET", "HEAD"])
async def icon(request: Request) -> Response:
    return _serve(request, "favicon.svg")


@router.api_route("/assets/{name}", methods=["GET", "HEAD"])
async def asset(request: Request, name: str) -> Response:
    return _serve(request, name)


def _serve(request: Request, name: str) -> Response:
    found = _ASSETS.get(name)
    if found is None:
        raise ApiError(404, f"there is no file {shorten(name)} here", code="not_found")
    headers = {**_HEADERS, "ETag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.body, media_type=found.media_type, headers=headers)


@router.get("/octavo/cache")
async def cache(request: Request) -> Response:
    """The cache at this moment (CacheSnapshot)."""
    return JsonResponse(await while_connected(request.receive, context_of(request).feed.snapshot()))


@router.get("/octavo/cache/events")
async def cache_events(request: Request) -> Response:
    """Server-sent events, each a CacheSnapshot."""
    feed = context_of(request).feed
    feed.enter()
    return EventStreamResponse(feed.frames(), close=feed.leave)
