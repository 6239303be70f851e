"""Every error that a client sees, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Under /v1/messages the shape is Anthropic's: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from typing import Literal, TypedDict

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineStopped, OctavoError, OverloadedError, RequestError

log = logging.getLogger("octavo.api")

_CODES = {401: "invalid_api_key", 403: "forbidden", 404: "not_found", 405: "method_not_allowed"}


#: How many frames of a traceback are logged, innermost first.
_LOGGED_FRAMES = 8


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorObject


class AnthropicErrorObject(TypedDict):
    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorObject


MESSAGES_PATH = "/v1/messages"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
#: Anthropic's clients know 529 where OpenAI's know 503: come back later.
_ANTHROPIC_OVERLOADED = 529


class ApiError(Exception):
    """An error with its HTTP status. `type` is "invalid_request_error" for the client's faults, else
    "server_error"."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> ErrorBody:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def anthropic_status(self) -> int:
        return _ANTHROPIC_OVERLOADED if self.code in ("overloaded", "shutting_down") else self.status

    def anthropic_body(self) -> AnthropicErrorBody:
        status = self.anthropic_status
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(message: str, *, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def model_not_found(name: str, served: tuple[str, ...]) -> ApiError:
    message = f"the model {shorten(name)} does not exist here; this server has {', '.join(served)}"
    return ApiError(404, message, param="model", code="model_not_found")


def unavailable(message: str, *, retry_after_s: int, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def shorten(value: object, limit: int = 80) -> str:
    """A value as it may be quoted in a message: its repr, cut to `limit` characters."""
    text = repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def to_api_error(error: Exception) -> ApiError:
    """What a client is told about `error`. Anything unforeseen is logged, without its message, and told as a
    500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return invalid(str(error), param=error.param, code=error.code)
    if isinstance(error, OverloadedError):
        return unavailable(str(error), retry_after_s=error.retry_after_s, code="overloaded")
    if isinstance(error, EngineStopped):
        return unavailable(str(error), retry_after_s=30, code="engine_dead")
    if isinstance(error, OctavoError):
        log_unexpected(error)
        return ApiError(500, str(error), code="internal_error")
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "http_error")
        return ApiError(error.status_code, error.detail, code=code, headers=error.headers)
    log_unexpected(error)
    return ApiError(500, "the server failed on this request; its log has the place", code="internal_error")


def log_unexpected(error: BaseException) -> None:
    """Log where an exception came from but not what it says: its message may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-_LOGGED_FRAMES:]
    where = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    log.error("unexpected %s at %s", type(error).__name__, where or "an unknown place")


class JsonResponse(Response):
    """JSON in UTF-8. NaN and infinity are programming errors, not text."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode_json(content)


def encode_json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def error_response(error: ApiError, path: str) -> JsonResponse:
    """The error in the shape of the API that `path` belongs to, whether or not there is such a route."""
    if path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/"):
        return JsonResponse(error.anthropic_body(), status_code=error.anthropic_status, headers=error.headers)
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers)


async def handle_exception(request: Request, error: Exception) -> Response:
    """The answer to whatever a route, the framework or a layer around them raises."""
    if isinstance(error, ClientGone):
        return Response(status_code=499)
    return error_response(_told(request, error), request.scope["path"])


def _told(request: Request, error: Exception) -> ApiError:
    if isinstance(error, HTTPException) and error.status_code == 404:
        message = f"there is no {request.method} {shorten(request.url.path)} here"
        return ApiError(404, message, code="not_found")
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed on {shorten(request.url.path)}; use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return to_api_error(error)
