"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal, NotRequired, TypedDict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import Caller, caller_of
from octavo.api.context import ServerContext, Usage, context_of, usage_of
from octavo.api.errors import JsonResponse, invalid
from octavo.api.generation import Answer, Choice, Generation, Idle, collect, while_connected
from octavo.api.receipts import ReceiptJson
from octavo.api.schemas.chat import ChatCompletionRequest, Message
from octavo.api.streaming import DONE, Frames, sse_comment, sse_data, stream_answer
from octavo.api.token_labels import ChatTokenLogprob, chat_logprobs
from octavo.api.tool_calls import Call, Piece, ToolCallObject, ToolCallParser, read_pieces
from octavo.engine.messages import Delta, Finished, GenerateRequest, PromptProgress, TokenLogprob
from octavo.engine.prompt import prompt_array
from octavo.text.tokenizer import Tokenizer

router = APIRouter()

ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Logprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallObject]]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    cache: ReceiptJson


class ChunkChoice(TypedDict):
    index: int
    delta: dict[str, Any]
    logprobs: Logprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    cache: NotRequired[ReceiptJson]


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    body = await context.read(request, ChatCompletionRequest)
    context.check_model(body.model)
    body.check()
    return await while_connected(request.receive, _answer(context, caller_of(request), body))


async def _answer(context: ServerContext, caller: Caller, body: ChatCompletionRequest) -> Response:
    tokenizer = context.engine.tokenizer
    params = body.sampling_params(
        vocab_size=tokenizer.vocab_size, max_tokens=body.token_limit, logprobs=body.wanted_logprobs
    )
    prompt = await asyncio.to_thread(
        render_chat, tokenizer, body.messages, body.offered_tools, body.add_generation_prompt is not False
    )
    chat_id = f"chatcmpl-{uuid.uuid4().hex}"
    generation = context.generations.open(
        [GenerateRequest(chat_id, prompt_array(prompt), params, body.cache_division, caller.tenant)]
    )
    writer = _ChatWriter(context, body, chat_id, caller.tenant)
    if not body.stream:
        with generation:
            (answer,) = (await collect(generation)).values()
            return JsonResponse(writer.completion(answer))
    return await stream_answer(generation, writer.frames(generation), wait_s=context.settings.keepalive_s)


def render_chat(
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
) -> list[int]:
    """Messages -> prompt ids. Raises ApiError and RequestError."""
    rendered = [message.for_template(i) for i, message in enumerate(messages)]
    return render_messages(tokenizer, rendered, tools, add_generation_prompt)


def render_messages(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
) -> list[int]:
    """Messages as templates take them -> prompt ids. Raises ApiError and RequestError."""
    if not tokenizer.has_chat_template:
        raise invalid("this model has no chat template; use /v1/completions", param="messages", code="no_chat_template")
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt)


class _ChatWriter:
    """Writes one answer in OpenAI's shapes, whole or in chunks."""

    def __init__(self, context: ServerContext, body: ChatCompletionRequest, chat_id: str, tenant: str) -> None:
        self._context = context
        self._body = body
        self._id = chat_id
        self._tenant = tenant
        self._created = int(time.time())
        self._n = body.n or 1
        self._parsers: list[ToolCallParser] | None = None
        if body.offered_tools:
            self._parsers = [ToolCallParser(parallel=body.parallel_tool_calls is not False) for _ in range(self._n)]

    def completion(self, answer: Answer) -> ChatCompletion:
        assert answer.finished is not None
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._body.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(answer.choices)],
            "usage": usage_of([answer.finished]),
            "system_fingerprint": self._context.system_fingerprint,
            "cache": self._context.issue_receipt(self._tenant, self._id, [answer.finished]),
        }

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        calls: list[ToolCallObject] = []
        text = ""
        for piece in self._pieces(index, choice.text, last=True):
            if isinstance(piece, Call):
                calls.append(piece.call)
            else:
                text += piece.text
        message: AnswerMessage = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._finish_reason(index, choice.finish_reason),
        }

    async def frames(self, generation: Generation) -> Frames:
        started = False
        finished: list[Finished] = []
        with generation:
            async for event in generation.events(idle_s=self._context.settings.keepalive_s):
                if isinstance(event, Idle):
                    yield sse_comment("waiting")
                elif isinstance(event, PromptProgress):
                    if self._body.include_progress:
                        yield sse_comment(f"prefill {event.done_tokens}/{event.prompt_tokens}")
                elif isinstance(event, Delta):
                    if not started:
                        started = True
                        for index in range(self._n):
                            yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
                    for frame in self._delta_frames(event):
                        yield frame
                elif isinstance(event, Finished):
                    finished.append(event)
        receipt = self._context.issue_receipt(self._tenant, self._id, finished)
        if self._body.include_usage:
            yield sse_data({**self._envelope(), "choices": [], "usage": usage_of(finished), "cache": receipt})
        yield DONE

    def _delta_frames(self, event: Delta) -> Iterator[bytes]:
        logprobs = self._logprobs(list(event.logprobs))
        pieces = self._pieces(event.index, event.text, last=event.finish_reason is not None)
        if logprobs is not None and logprobs["content"] and not pieces:
            yield self._chunk(event.index, {"content": ""}, logprobs)
        for position, piece in enumerate(pieces):
            # A token's log-probabilities are told once, with the first piece.
            told = logprobs if position == 0 else None
            if isinstance(piece, Call):
                yield self._chunk(event.index, {"tool_calls": [{"index": piece.index, **piece.call}]}, told)
            else:
                yield self._chunk(event.index, {"content": piece.text}, told)
        if event.finish_reason is not None:
            yield self._chunk(event.index, {}, finish_reason=self._finish_reason(event.index, event.finish_reason))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Logprobs | None = None,
        finish_reason: ChatFinishReason | None = None,
    ) -> bytes:
        choice: ChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk: ChatChunk = {**self._envelope(), "choices": [choice]}
        if self._body.include_usage:
            chunk["usage"] = None
        return sse_data(chunk)

    def _envelope(self) -> ChatChunk:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._body.model,
            "system_fingerprint": self._context.system_fingerprint,
            "choices": [],
        }

    def _pieces(self, index: int, text: str, *, last: bool) -> list[Piece]:
        """The text of a choice as content and tool calls."""
        return read_pieces(self._parsers[index] if self._parsers else None, text, last=last)

    def _finish_reason(self, index: int, reason: str | None) -> ChatFinishReason:
        if reason == "length":
            return "length"
        called = self._parsers is not None and self._parsers[index].n_calls > 0
        return "tool_calls" if called else "stop"

    def _logprobs(self, entries: list[TokenLogprob]) -> Logprobs | None:
        if not self._body.logprobs:
            return None
        return {"content": chat_logprobs(self._context.engine.tokenizer, entries), "refusal": None}
