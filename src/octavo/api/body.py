"""From the bytes of a request to a validated model, with errors that name the field, its limit and the
value."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from octavo.api.errors import ApiError, ClientGone, invalid, shorten
from octavo.api.schemas.common import RequestModel

Model = TypeVar("Model", bound=RequestModel)

#: Larger bodies are parsed on another thread, so that streams do not stall meanwhile.
_PARSED_AT_ONCE = 1 << 16


async def read_body(request: Request, model: type[Model], *, max_bytes: int, timeout_s: float) -> Model:
    """Read, parse and validate. Raises ApiError (400, 408, 413, 415) and ClientGone."""
    _check_headers(request, max_bytes)
    data = await _read(request, max_bytes, timeout_s)
    if len(data) <= _PARSED_AT_ONCE:
        return parse_body(data, model)
    return await asyncio.to_thread(parse_body, data, model)


def parse_body(data: bytes, model: type[Model]) -> Model:
    """JSON as RFC 8259 has it: no NaN, no lone surrogates, valid UTF-8, at most about 200 levels deep."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, not {_json_type(value)}", code="invalid_type")
    model.refuse_unsupported(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _validation_error(error.errors(include_url=False)[0]) from None


def _check_headers(request: Request, max_bytes: int) -> None:
    content_type = request.headers.get("content-type", "")
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"the content type must be application/json, not {shorten(content_type) if content_type else 'absent'}",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise ApiError(415, f"content-encoding {shorten(encoding)} is not supported", code="unsupported_media_type")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="request_timeout") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    # Whatever remains of the body is not read, so the connection cannot be used again.
    message = f"the body is larger than this server's limit of {max_bytes} bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "another type")


_TYPE_NAMES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _validation_error(error: ErrorDetails) -> ApiError:
    param = _param(error["loc"])
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "missing":
        return invalid(f"{param} is required", param=param, code="missing_required_parameter")
    if kind in _TYPE_NAMES:
        message = f"{param} must be {_TYPE_NAMES[kind]}, not {_json_type(value)} ({shorten(value)})"
        return invalid(message, param=param, code="invalid_type")
    limits = {
        "greater_than": ("gt", "must be greater than"),
        "greater_than_equal": ("ge", "must be at least"),
        "less_than": ("lt", "must be less than"),
        "less_than_equal": ("le", "must be at most"),
    }
    if kind in limits:
        key, words = limits[kind]
        return invalid(f"{param} {words} {context[key]}, got {shorten(value)}", param=param)
    if kind == "finite_number":
        return invalid(f"{param} must be a finite number, got {shorten(value)}", param=param)
    if kind == "literal_error":
        return invalid(f"{param} must be {context['expected']}, got {shorten(value)}", param=param)
    if kind in ("string_too_long", "string_too_short", "too_long", "too_short"):
        bound = "at most" if kind.endswith("long") else "at least"
        limit = context.get("max_length") if kind.endswith("long") else context.get("min_length")
        unit = "characters" if kind.startswith("string") else "items"
        length = len(value) if isinstance(value, str | list | dict) else 0
        return invalid(f"{param} must have {bound} {limit} {unit}, got {length}", param=param)
    return invalid(f"{param}: {error['msg']}" if param else error["msg"], param=param)


def _param(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> "messages[0].role". A part such as "<text>" is a union's tag, not a key."""
    text = ""
    for part in location:
        if isinstance(part, str) and part.startswith("<") and part.endswith(">"):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
