"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import Caller, caller_of
from octavo.api.context import ServerContext, Usage, context_of, usage_of
from octavo.api.errors import JsonResponse, invalid
from octavo.api.generation import Answer, Generation, Idle, collect, while_connected
from octavo.api.receipts import ReceiptJson
from octavo.api.schemas.completions import CompletionRequest, Prompt, check_token_ids
from octavo.api.streaming import DONE, Frames, sse_comment, sse_data, stream_answer
from octavo.api.token_labels import CompletionLogprobs, CompletionLogprobsBuilder
from octavo.engine.messages import (
    Delta,
    Finished,
    GenerateRequest,
    PromptLogprobs,
    PromptProgress,
    TokenLogprob,
)
from octavo.engine.prompt import I32, prompt_array
from octavo.text.tokenizer import Tokenizer

router = APIRouter()

CompletionFinishReason = Literal["stop", "length"]


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinishReason | None


class Completion(TypedDict):
    """A whole answer and a chunk of a stream have the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    cache: NotRequired[ReceiptJson]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """A prompt as the model reads it (int32 [n], read-only) and as echo shows it."""

    token_ids: I32
    text: str


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    context = context_of(request)
    body = await context.read(request, CompletionRequest)
    context.check_model(body.model)
    body.check()
    return await while_connected(request.receive, _answer(context, caller_of(request), body))


async def _answer(context: ServerContext, caller: Caller, body: CompletionRequest) -> Response:
    tokenizer = context.engine.tokenizer
    params = body.sampling_params(
        vocab_size=tokenizer.vocab_size,
        max_tokens=body.token_limit,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    prompts = await asyncio.to_thread(encode_prompts, tokenizer, body.prompt, body.add_special_tokens is not False)
    completion_id = f"cmpl-{uuid.uuid4().hex}"
    writer = _CompletionWriter(context, body, completion_id, prompts, caller.tenant)
    generation = context.generations.open(
        [
            GenerateRequest(writer.request_id(i), prompt.token_ids, params, body.cache_division, caller.tenant)
            for i, prompt in enumerate(prompts)
        ]
    )
    if not body.stream:
        with generation:
            return JsonResponse(writer.completion(await collect(generation)))
    return await stream_answer(generation, writer.frames(generation), wait_s=context.settings.keepalive_s)


def encode_prompts(tokenizer: Tokenizer, prompts: list[Prompt], add_special: bool) -> list[EncodedPrompt]:
    """Raises ApiError for ids beyond the vocabulary and for prompts without tokens."""
    encoded = []
    for position, prompt in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt[{position}]"
        if isinstance(prompt, str):
            token_ids = tokenizer.encode(prompt, add_special=add_special, parse_special=True)
        else:
            token_ids = prompt
            check_token_ids(token_ids, tokenizer.vocab_size, param)
        if not token_ids:
            raise invalid(f"{param} has no tokens; at least one is needed to go on from", param=param)
        text = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids, skip_special=False)
        encoded.append(EncodedPrompt(prompt_array(token_ids), text))
    return encoded


class _CompletionWriter:
    """Writes the choices of all prompts; choice i of prompt p has the index p * n + i."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        completion_id: str,
        prompts: list[EncodedPrompt],
        tenant: str,
    ) -> None:
        self._context = context
        self._tenant = tenant
        self._body = body
        self._id = completion_id
        self._prompts = prompts
        self._created = int(time.time())
        self._n = body.n or 1
        self._prompt_of = {self.request_id(i): i for i in range(len(prompts))}
        top = bool(body.logprobs)
        self._logprobs = [
            CompletionLogprobsBuilder(context.engine.tokenizer, top=top) for _ in range(len(prompts) * self._n)
        ]

    def request_id(self, prompt: int) -> str:
        return f"{self._id}-{prompt}"

    def completion(self, answers: dict[str, Answer]) -> Completion:
        choices: list[CompletionChoice] = []
        finished: list[Finished] = []
        for request_id, answer in answers.items():
            assert answer.finished is not None
            finished.append(answer.finished)
            prompt = self._prompts[self._prompt_of[request_id]]
            for choice in answer.choices:
                index = len(choices)
                token_ids, entries = choice.token_ids, list[TokenLogprob | None](choice.logprobs)
                if self._body.echo:
                    token_ids = [*prompt.token_ids.tolist(), *token_ids]
                    entries = [*(answer.prompt_logprobs or ()), *entries]
                choices.append(
                    {
                        "text": prompt.text + choice.text if self._body.echo else choice.text,
                        "index": index,
                        "logprobs": self._build_logprobs(index, token_ids, entries),
                        "finish_reason": _finish_reason(choice.finish_reason),
                    }
                )
        receipt = self._context.issue_receipt(self._tenant, self._id, finished)
        return {**self._envelope(), "choices": choices, "usage": usage_of(finished), "cache": receipt}

    async def frames(self, generation: Generation) -> Frames:
        echoed: set[int] = set()
        prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}
        finished: list[Finished] = []
        with generation:
            async for event in generation.events(idle_s=self._context.settings.keepalive_s):
                if isinstance(event, Idle):
                    yield sse_comment("waiting")
                    continue
                prompt = self._prompt_of[event.request_id]
                if isinstance(event, PromptProgress) and self._body.include_progress:
                    yield sse_comment(f"prefill {event.done_tokens}/{event.prompt_tokens}")
                elif isinstance(event, PromptLogprobs):
                    prompt_logprobs[prompt] = list(event.entries)
                elif isinstance(event, Delta):
                    index = prompt * self._n + event.index
                    if self._body.echo and index not in echoed:
                        echoed.add(index)
                        encoded = self._prompts[prompt]
                        entries = prompt_logprobs.get(prompt, [])
                        yield self._chunk(index, encoded.text, encoded.token_ids.tolist(), entries)
                    if event.text or (event.logprobs and self._body.logprobs is not None):
                        yield self._chunk(index, event.text, list(event.token_ids), list(event.logprobs))
                    if event.finish_reason is not None:
                        yield self._chunk(index, "", [], [], _finish_reason(event.finish_reason))
                elif isinstance(event, Finished):
                    finished.append(event)
        receipt = self._context.issue_receipt(self._tenant, self._id, finished)
        if self._body.include_usage:
            yield sse_data({**self._envelope(), "usage": usage_of(finished), "cache": receipt})
        yield DONE

    def _chunk(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        entries: list[TokenLogprob | None],
        finish_reason: CompletionFinishReason | None = None,
    ) -> bytes:
        logprobs = self._build_logprobs(index, token_ids, entries) if token_ids else None
        choice: CompletionChoice = {
            "text": text,
            "index": index,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk: Completion = {**self._envelope(), "choices": [choice]}
        if self._body.include_usage:
            chunk["usage"] = None
        return sse_data(chunk)

    def _build_logprobs(
        self, index: int, token_ids: list[int], entries: list[TokenLogprob | None]
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        return self._logprobs[index].build(token_ids, entries)

    def _envelope(self) -> Completion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model,
            "system_fingerprint": self._context.system_fingerprint,
            "choices": [],
        }


def _finish_reason(reason: str | None) -> CompletionFinishReason:
    return "length" if reason == "length" else "stop"
