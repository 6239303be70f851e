"""The outermost layer: request ids, the access log, keys, rates, and the last line against exceptions."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api.auth import ONLY_CALLER, check_key, check_origin, is_for_admins, needs_key, set_caller
from octavo.api.contract import Contract
from octavo.api.errors import handle_exception
from octavo.api.rates import RateLimits
from octavo.api.settings import ServerSettings

access_log = logging.getLogger("octavo.access")


class EdgeMiddleware:
    """Wraps the application, and tells it whose each request is (`auth.caller_of`).

    Its log has method, route, status and time: no query, no header, no body.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, contract: Contract) -> None:
        self._app = app
        self._settings = settings
        self._contract = contract
        self._rates = RateLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        request_id = f"req_{uuid.uuid4().hex}"
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                # One id under two names: OpenAI's clients read the first, Anthropic's the second.
                headers["x-request-id"] = headers["request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - nothing above this layer answers in the API's shape
            response = await handle_exception(Request(scope), error)
            if status == 0:
                await response(scope, receive, send_with_id)
        finally:
            milliseconds = (time.monotonic() - began) * 1e3
            path = _route(scope)
            access_log.info("%s %s %d %.1f ms %s", scope["method"], path, status, milliseconds, request_id)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        # Once, so that all of a request is decided by one policy.
        contract = self._contract.now
        caller = ONLY_CALLER
        if contract.keys:
            if not needs_key(scope["path"]):
                return
            caller = check_key(headers, contract.keys)
            if is_for_admins(scope["path"]) and not caller.is_admin:
                raise HTTPException(404)
        else:
            check_origin(headers, host=self._settings.host, is_local=self._settings.is_local)
        set_caller(scope, caller)
        if scope["method"] == "POST":
            self._rates.take(caller.tenant, contract.policy.tenant(caller.tenant).rate)


def _route(scope: Scope) -> str:
    """The pattern of the route that answered, such as /v1/models/{model}: what clients write never reaches the log."""
    return str(getattr(scope.get("route"), "path", "(no route)"))
