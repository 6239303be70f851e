"""Octavo from Python: load a model, generate, chat, stream."""

from __future__ import annotations

import queue
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from octavo.config import CachePolicy, EngineConfig, parse_bytes
from octavo.engine.client import EngineClient, EngineStats
from octavo.engine.messages import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    PromptProgress,
    SamplingParams,
    Started,
    TokenLogprob,
)
from octavo.engine.prompt import I32, prompt_array
from octavo.errors import EngineStopped, OverloadedError, RequestError

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

#: How often a wait for an event looks whether the engine is alive.
POLL_S = 1.0
#: How long a dead engine's answers are waited for: its thread still tells everyone.
LAST_WORDS_S = 2.0


@dataclass(slots=True)
class Completion:
    """One choice: its text, tokens (stop token included) and, if asked for, log-probabilities."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True, eq=False)
class RequestOutput:
    """What one prompt brought. Times are in seconds from submission; `kv_bytes` is what its pages took.

    `prompt_token_ids` is int32 [n], read-only.
    """

    prompt_token_ids: I32
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    kv_bytes: int = 0
    queued_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text


class LLM:
    """A model and its engine in this process.

        with LLM("smollm2-135m") as llm:
            print(llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text)

    Args:
        model: catalog name, GGUF file, Hugging Face directory, or hub id.
        kv_memory: budget of the page arena, such as "512MiB"; None chooses by free memory.
        policy: codecs and sharing of the cache.
        others: see `octavo.config.EngineConfig`.

    Raises LoadError or ConfigError. Close it (or use `with`) to give the memory back.
    """

    def __init__(
        self, model: str, *, kv_memory: str | int | None = None, policy: CachePolicy | None = None, **settings: Any
    ) -> None:
        # Imported here so that `from octavo import SamplingParams` does not load kernels.
        from octavo.engine.build import build_engine

        config = EngineConfig(
            kv_memory_bytes=None if kv_memory is None else parse_bytes(kv_memory),
            policy=policy or CachePolicy(),
            **settings,
        )
        self._attach(build_engine(model, config))

    @classmethod
    def from_engine(cls, engine: EngineClient) -> LLM:
        """Wrap an engine that runs already; closing the result closes the engine."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: EngineClient) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Any:
        """Complete one prompt (-> RequestOutput) or several at once (-> list of RequestOutput, in order).

        A prompt is text or token ids. There may be more of them than the engine's queue takes at once. Raises
        RequestError for the first prompt that cannot be served.
        """
        if isinstance(prompts, Iterator):
            prompts = list(prompts)  # looked at twice below
        if _is_one_prompt(prompts):
            return self._run([self._tokens(prompts)], params, cache_salt)[0]
        return self._run([self._tokens(p) for p in prompts], params, cache_salt)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Answer a conversation in OpenAI's message shape, through the model's own chat template."""
        tokens = prompt_array(self.tokenizer.apply_chat_template(messages, tools=tools))
        return self._run([tokens], params, cache_salt)[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[Event]:
        """The engine's events for one prompt or conversation, as they happen: Started, PromptProgress ..., Delta ...,
        Finished. Leaving the loop early cancels the request."""
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        tokens = prompt_array(self.tokenizer.apply_chat_template(prompt)) if chat else self._tokens(prompt)  # type: ignore[arg-type]
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = self._request(tokens, params, cache_salt)
        self.engine.submit(request, events.put)
        over = False
        try:
            while not over:
                event = self._next(events)
                if isinstance(event, Failed):
                    over = True
                    raise event.error
                over = isinstance(event, Finished)
                yield event
        finally:
            if not over:
                self.engine.cancel(request.request_id)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Give the memory back. Raises CloseTimeout when the step in progress does not end in time."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tokens(self, prompt: object) -> I32:
        if isinstance(prompt, str):
            return prompt_array(self.tokenizer.encode(prompt, parse_special=True))
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is text or token ids, got {type(prompt).__name__}", param="prompt")
        return prompt_array(prompt)

    def _request(self, tokens: I32, params: SamplingParams | None, cache_salt: str) -> GenerateRequest:
        return GenerateRequest(f"llm-{uuid.uuid4().hex}", tokens, params or SamplingParams(), cache_salt)

    def _next(self, events: queue.SimpleQueue[Event]) -> Event:
        """The next event. Raises EngineStopped when the engine is dead and none is left."""
        while True:
            # Asked before looking, so that what a dying engine still said is found.
            alive = self.engine.is_healthy()
            try:
                return events.get(timeout=POLL_S if alive else LAST_WORDS_S)
            except queue.Empty:
                if not alive:
                    raise EngineStopped("the engine has stopped; its log has the reason") from None

    def _run(self, prompts: list[I32], params: SamplingParams | None, cache_salt: str) -> list[RequestOutput]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        requests = [self._request(tokens, params, cache_salt) for tokens in prompts]
        outputs = {
            r.request_id: RequestOutput(tokens, [Completion(i) for i in range(r.params.n)])
            for r, tokens in zip(requests, prompts, strict=True)
        }
        waiting = deque(requests)
        in_flight: set[str] = set()
        try:
            while waiting or in_flight:
                while waiting:
                    try:
                        self.engine.submit(waiting[0], events.put)
                    except OverloadedError:
                        if not in_flight:
                            raise
                        break  # the queue is full of these prompts: one has to end first
                    in_flight.add(waiting.popleft().request_id)
                event = self._next(events)
                if isinstance(event, Failed):
                    raise event.error
                _apply(outputs[event.request_id], event)
                if isinstance(event, Finished):
                    in_flight.remove(event.request_id)
        except BaseException:
            for request_id in in_flight:
                self.engine.cancel(request_id)
            raise
        return list(outputs.values())


def _is_one_prompt(prompts: object) -> bool:
    """Text or token ids, rather than a sequence of such."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        return True
    first = next(iter(prompts), None)
    return first is not None and not isinstance(first, str | bytes | Iterable)


def _apply(output: RequestOutput, event: Event) -> None:
    if isinstance(event, Delta):
        choice = output.outputs[event.index]
        choice.text += event.text
        choice.token_ids.extend(event.token_ids)
        choice.logprobs.extend(event.logprobs)
        choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
    elif isinstance(event, PromptLogprobs):
        output.prompt_logprobs = list(event.entries)
    elif isinstance(event, Finished):
        output.cached_tokens = event.cached_tokens
        output.completion_tokens = event.completion_tokens
        output.preemptions = event.preemptions
        output.kv_bytes = event.kv_bytes
        output.queued_s, output.first_token_s, output.total_s = event.queued_s, event.first_token_s, event.total_s
    elif not isinstance(event, Started | PromptProgress):
        raise RequestError(f"unexpected event {type(event).__name__}")
