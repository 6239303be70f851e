"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any, Literal, NotRequired, TypedDict

from fastapi import APIRouter
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.anthropic_prompt import build_prompt
from octavo.api.auth import Caller, caller_of
from octavo.api.cache_control import CacheControl, MessagesUsage, messages_usage, pin_prefixes
from octavo.api.context import ServerContext, context_of
from octavo.api.errors import JsonResponse
from octavo.api.generation import Choice, Generation, Idle, collect, while_connected
from octavo.api.receipts import ReceiptJson
from octavo.api.schemas.messages import CountTokensRequest, MessagesRequest
from octavo.api.streaming import Frames, anthropic_error_frame, sse_comment, sse_event, stream_answer
from octavo.api.tool_calls import Call, Piece, Text, ToolCallObject, ToolCallParser, read_pieces
from octavo.engine.messages import Delta, Finished, GenerateRequest, Started
from octavo.engine.prompt import prompt_array

router = APIRouter()

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(TypedDict):
    """A whole answer; in a stream, what is known of it at the start."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    cache: NotRequired[ReceiptJson]


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    context = context_of(request)
    body = await context.read(request, MessagesRequest)
    context.check_model(body.model)
    body.check()
    return await while_connected(request.receive, _answer(context, caller_of(request), body))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    context = context_of(request)
    body = await context.read(request, CountTokensRequest)
    context.check_model(body.model)
    body.check()
    prompt = await asyncio.to_thread(build_prompt, context.engine.tokenizer, body)
    return JsonResponse({"input_tokens": len(prompt.token_ids)})


async def _answer(context: ServerContext, caller: Caller, body: MessagesRequest) -> Response:
    params = body.sampling_params()
    prompt = await asyncio.to_thread(build_prompt, context.engine.tokenizer, body)
    message_id = f"msg_{uuid.uuid4().hex}"
    request = GenerateRequest(message_id, prompt_array(prompt.token_ids), params, body.cache_division, caller.tenant)
    generation = context.generations.open([request])
    writer = _MessageWriter(context, body, request, prompt.control)
    if not body.stream:
        with generation:
            (answer,) = (await collect(generation)).values()
            assert answer.finished is not None
            await writer.pin()
            return JsonResponse(writer.message(answer.choices[0], answer.finished))
    return await stream_answer(
        generation,
        writer.frames(generation),
        wait_s=context.settings.keepalive_s,
        error_frame=anthropic_error_frame,
    )


class _MessageWriter:
    """Writes one answer in Anthropic's shapes, whole or as events."""

    def __init__(
        self, context: ServerContext, body: MessagesRequest, request: GenerateRequest, control: CacheControl
    ) -> None:
        self._context = context
        self._body = body
        self._request = request
        # Without a prefix cache nothing is created either.
        self._control = control if context.engine.info.prefix_cache else CacheControl()
        self._parser = ToolCallParser(parallel=body.parallel_tools) if body.offered_tools else None
        self._n_blocks = 0
        self._text_is_open = False

    def message(self, choice: Choice, finished: Finished) -> Message:
        content: list[dict[str, Any]] = []
        for piece in read_pieces(self._parser, choice.text, last=True):
            if isinstance(piece, Call):
                content.append({**_tool_use(piece.call), "input": from_json(piece.call["function"]["arguments"])})
            elif content and content[-1]["type"] == "text":
                content[-1]["text"] += piece.text
            else:
                content.append({"type": "text", "text": piece.text})
        return {
            **self._envelope(self._usage(finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens)),
            "content": content,
            "stop_reason": self._stop_reason(choice.finish_reason, choice.stop_reason),
            "stop_sequence": _stop_sequence(choice.stop_reason),
            "cache": self._context.issue_receipt(self._request.tenant, self._request.request_id, [finished]),
        }

    async def pin(self) -> None:
        """Keep what the request has marked."""
        if self._control.breakpoints:
            await asyncio.to_thread(pin_prefixes, self._context.engine, self._request, self._control)

    async def frames(self, generation: Generation) -> Frames:
        last: Delta | None = None
        finished: Finished | None = None
        started = False
        with generation:
            async for event in generation.events(idle_s=self._context.settings.keepalive_s):
                if isinstance(event, Idle):
                    # Clients expect nothing before message_start, not even a ping.
                    yield sse_event({"type": "ping"}) if started else sse_comment("waiting")
                elif isinstance(event, Started):
                    started = True
                    usage = self._usage(event.prompt_tokens, event.cached_tokens, 0)
                    yield sse_event({"type": "message_start", "message": self._envelope(usage)})
                elif isinstance(event, Delta):
                    last = event
                    for piece in read_pieces(self._parser, event.text, last=event.finish_reason is not None):
                        for frame in self._piece_frames(piece):
                            yield frame
                elif isinstance(event, Finished):
                    finished = event
        assert last is not None
        assert finished is not None
        for frame in self._close_text():
            yield frame
        await self.pin()
        yield sse_event(
            {
                "type": "message_delta",
                "delta": {
                    "stop_reason": self._stop_reason(last.finish_reason, last.stop_reason),
                    "stop_sequence": _stop_sequence(last.stop_reason),
                },
                "usage": self._usage(finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens),
                "cache": self._context.issue_receipt(self._request.tenant, self._request.request_id, [finished]),
            }
        )
        yield sse_event({"type": "message_stop"})

    def _piece_frames(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Text):
            if not self._text_is_open:
                yield from self._open_block({"type": "text", "text": ""})
                self._text_is_open = True
            yield self._delta({"type": "text_delta", "text": piece.text})
            return
        yield from self._close_text()
        yield from self._open_block({**_tool_use(piece.call), "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": piece.call["function"]["arguments"]})
        yield self._stop_block()

    def _open_block(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield sse_event({"type": "content_block_start", "index": self._n_blocks, "content_block": block})
        if self._n_blocks == 0:
            yield sse_event({"type": "ping"})
        self._n_blocks += 1

    def _delta(self, delta: dict[str, str]) -> bytes:
        return sse_event({"type": "content_block_delta", "index": self._n_blocks - 1, "delta": delta})

    def _stop_block(self) -> bytes:
        return sse_event({"type": "content_block_stop", "index": self._n_blocks - 1})

    def _close_text(self) -> Iterator[bytes]:
        if self._text_is_open:
            self._text_is_open = False
            yield self._stop_block()

    def _envelope(self, usage: MessagesUsage) -> Message:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> MessagesUsage:
        return messages_usage(
            self._control,
            page_size=self._context.engine.info.page_size,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
        )

    def _stop_reason(self, reason: str | None, stopped_by: str | int | None) -> StopReason:
        if reason == "length":
            return "max_tokens"
        if _stop_sequence(stopped_by) is not None:
            return "stop_sequence"
        return "tool_use" if self._parser is not None and self._parser.n_calls else "end_turn"


def _tool_use(call: ToolCallObject) -> dict[str, Any]:
    return {"type": "tool_use", "id": "toolu_" + call["id"].removeprefix("call_"), "name": call["function"]["name"]}


def _stop_sequence(stopped_by: str | int | None) -> str | None:
    """The text that ended the answer; a token that did is none of the client's."""
    return stopped_by if isinstance(stopped_by, str) else None
