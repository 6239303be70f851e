"""An engine that follows a script: every sequence of events that the API must survive, on demand."""

from __future__ import annotations

import codecs
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.cache.pins import Pin
from octavo.cache.policy import Policy
from octavo.cache.receipt import Holdings, Receipt
from octavo.engine.client import (
    CacheReport,
    EngineInfo,
    EngineStats,
    ErasureReport,
    FrameMap,
    PageClassInfo,
    PageCounts,
)
from octavo.engine.messages import (
    Delta,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    PromptLogprobs,
    PromptProgress,
    Sink,
    Started,
    TokenLogprob,
)
from octavo.errors import RequestError

PAGE_SIZE = 16
VOCAB_SIZE = 260
CONTROL = {256: "<|im_start|>", 257: "<|im_end|>", 258: "<|endoftext|>", 259: "<|unused|>"}
EOS = 257


class ChatByteTokenizer:
    """Token i is byte i; four control tokens follow. ChatML, with tools in the system message."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS})
    bos_token_id: int | None = None
    has_chat_template = True

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        if not parse_special:
            return list(text.encode())
        for token_id, name in CONTROL.items():
            before, found, after = text.partition(name)
            if found:
                return [
                    *self.encode(before, parse_special=True),
                    token_id,
                    *self.encode(after, parse_special=True),
                ]
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        data = b"".join(self.token_bytes(t) if t < 256 or skip_special else CONTROL[t].encode() for t in token_ids)
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise RequestError("the conversation must not begin with the assistant", param="messages")
        tokens: list[int] = []
        if tools:
            tokens += [256, *b"system\n", *json.dumps(list(tools)).encode(), 257, 10]
        for message in messages:
            body = message["content"] + "".join(
                "<tool_call>" + json.dumps(c["function"]) for c in message.get("tool_calls", ())
            )
            tokens += [256, *f"{message['role']}\n{body}".encode(), 257, 10]
        return tokens + ([256, *b"assistant\n"] if add_generation_prompt else [])


def fake_logprob(token_id: int, n_top: int) -> TokenLogprob:
    value = -0.125 - (token_id % 8) / 8
    return TokenLogprob(token_id, value, tuple(((token_id + i) % VOCAB_SIZE, value - i / 16) for i in range(n_top)))


@dataclass
class Script:
    """What the engine does with a request.

    Attributes:
        reply: the text that is generated, unless max_tokens ends it earlier.
        gate: a token is generated each time this is released; None: at once.
        prefill_gate: the prompt is done once this is set; None: at once.
        fail_after: after so many tokens the request fails with `error`.
        refuse: raised by submit.
    """

    reply: str = "Hello, wörld 👋!"
    gate: threading.Semaphore | None = None
    prefill_gate: threading.Event | None = None
    fail_after: int | None = None
    error: Exception = field(default_factory=lambda: RuntimeError("secret prompt text in an exception"))
    refuse: Exception | None = None
    cancel_after: int | None = None


class ScriptedEngine:
    """Implements EngineClient. Each request runs on a thread of its own; the prefix cache is a set of prefixes."""

    profile = None

    def __init__(self, *, max_model_len: int = 512, prefix_cache: bool = True) -> None:
        self.tokenizer = ChatByteTokenizer()
        self.info = EngineInfo(
            model_name="scripted",
            backend="scripted",
            max_model_len=max_model_len,
            max_num_seqs=8,
            vocab_size=VOCAB_SIZE,
            page_size=PAGE_SIZE,
            key_codec="int8",
            value_codec="int8",
            bytes_per_token=64.0,
            kv_memory_bytes=64 * PAGE_SIZE * 64,
            prefix_cache=prefix_cache,
            page_classes=(
                PageClassInfo("full", "int8", False, PAGE_SIZE * 64),
                PageClassInfo("full", "open", True, PAGE_SIZE * 64),
            ),
        )
        self.script = Script()
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.pins: dict[str, Pin] = {}
        self._running: dict[str, threading.Event] = {}
        self._pages: set[tuple[str, str, bytes]] = set()
        self._changed = threading.Condition()
        self._dead = False
        self._hits = self._queries = self._prompt = self._generated = 0

    # ---- EngineClient -------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        script = self.script
        if script.refuse is not None:
            raise script.refuse
        n_prompt, wanted = len(request.prompt_token_ids), request.params.max_tokens
        total = n_prompt + (1 if wanted is None else wanted)
        if total > self.info.max_model_len:
            raise RequestError(
                f"maximum context length is {self.info.max_model_len} tokens, the request needs {total}",
                param="prompt" if n_prompt >= self.info.max_model_len else "max_tokens",
                code="context_length_exceeded",
            )
        stop = threading.Event()
        with self._changed:
            self.requests.append(request)
            self._running[request.request_id] = stop
            self._changed.notify_all()
        threading.Thread(target=self._run, args=(request, sink, script, stop), daemon=True).start()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            if request_id in self._running:
                self._running[request_id].set()
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        cached = len(self._pages)
        return EngineStats(
            requests_running=len(self._running),
            requests_waiting=0,
            pages=(
                PageCounts("full", "int8", False, 0, min(cached, 60), 60 - min(cached, 60)),
                PageCounts("full", "open", True, min(len(self._running), 4), 0, 4 - min(len(self._running), 4)),
            ),
            frames_total=16,
            frames_free=16 - min(cached, 60) // 4,
            frame_bytes=4 * PAGE_SIZE * 64,
            kv_used_bytes=min(cached, 60) * PAGE_SIZE * 64,
            kv_total_bytes=self.info.kv_memory_bytes,
            hit_tokens=self._hits,
            query_tokens=self._queries,
            prompt_tokens=self._prompt,
            generation_tokens=self._generated,
            preemptions=0,
            evicted_pages=0,
            misses=(),
            cascade_refused=0,
            steps=self._generated,
        )

    def page_map(self) -> list[FrameMap]:
        cached, running = min(len(self._pages), 60), len(self._running)
        states = "c" * cached + "f" * (60 - cached)
        if running:
            states = "a" * min(cached, 4) + states[min(cached, 4) :]
        frames = []
        for start in range(0, 60, 4):
            slots = states[start : start + 4]
            frames.append(FrameMap(0, slots) if slots != "ffff" else FrameMap(None, ""))
        opened = "".join("o" if i < running else "f" for i in range(4))
        return [*frames, FrameMap(1, opened) if running else FrameMap(None, "")]

    def apply_policy(self, policy: Policy) -> None:
        self.policy = policy

    def pin(self, tenant: str, salt: str, prompt: Any, ttl_s: float) -> Pin:
        n_tokens = len(prompt) // PAGE_SIZE * PAGE_SIZE
        if (tenant, salt, prompt[:n_tokens].tobytes()) not in self._pages or not n_tokens:
            raise RequestError("no whole page of this prompt is cached, so there is nothing to pin", param="prompt")
        pin = Pin(f"pin_{len(self.pins)}", tenant, n_tokens, n_tokens * 64, time.time() + ttl_s)
        self.pins[pin.id] = pin
        return pin

    def unpin(self, tenant: str, pin_id: str) -> Pin | None:
        pin = self.pins.get(pin_id)
        return self.pins.pop(pin_id) if pin is not None and pin.tenant == tenant else None

    def erase(self, tenant: str, salt: str | None = None) -> ErasureReport:
        gone = [key for key in self._pages if key[0] == tenant and salt in (None, key[1])]
        self._pages.difference_update(gone)
        return ErasureReport(len(gone), 0, 1, 0, len(self._running))

    def cache_report(self) -> CacheReport:
        return CacheReport(self._hits, self._queries, ((1.0, 0.0),), {})

    def is_healthy(self) -> bool:
        return not self._dead

    def close(self) -> None:
        self.die()

    # ---- for tests ------------------------------------------------------------------------------------

    def die(self) -> None:
        """Stop as a crashed engine does: no request hears of it."""
        self._dead = True
        for stop in list(self._running.values()):
            stop.set()

    def wait_until(self, what: str, timeout_s: float = 10.0) -> None:
        """`what` is "running" (some request) or "idle" (none)."""
        with self._changed:
            done = self._changed.wait_for(lambda: bool(self._running) == (what == "running"), timeout_s)
        assert done, f"the engine was not {what} within {timeout_s:g} s"

    # ---- the request's thread -----------------------------------------------------------------------

    def _run(self, request: GenerateRequest, sink: Sink, script: Script, stop: threading.Event) -> None:
        def emit(event: Event) -> None:
            if not self._dead:
                sink(event)

        try:
            self._generate(request, emit, script, stop)
        finally:
            with self._changed:
                del self._running[request.request_id]
                self._changed.notify_all()

    def _generate(self, request: GenerateRequest, emit: Sink, script: Script, stop: threading.Event) -> None:
        began = time.monotonic()
        request_id, prompt, params = request.request_id, request.prompt_token_ids, request.params
        cached = self._look_up(request)
        emit(Started(request_id, len(prompt), cached))
        while script.prefill_gate is not None and not stop.is_set() and not script.prefill_gate.wait(0.01):
            pass
        emit(PromptProgress(request_id, len(prompt), len(prompt)))
        if params.prompt_logprobs is not None:
            n_top = params.prompt_logprobs
            entries = (None, *(fake_logprob(token, n_top) for token in prompt[1:].tolist()))
            emit(PromptLogprobs(request_id, entries))
        choices = [_ChoiceScript(request, index, script) for index in range(params.n)]
        generated = 0
        while any(not choice.done for choice in choices):
            for choice in choices:
                if choice.done:
                    continue
                while script.gate is not None and not stop.is_set() and not script.gate.acquire(timeout=0.01):
                    pass
                if stop.is_set() or (script.cancel_after is not None and generated >= script.cancel_after):
                    choice.done = True
                    emit(Delta(request_id, choice.index, "", (), (), "cancelled"))
                    continue
                if script.fail_after is not None and generated >= script.fail_after:
                    emit(Failed(request_id, script.error))
                    return
                delta = choice.step()
                generated += len(delta.token_ids)
                emit(delta)
        self._generated += generated
        total = time.monotonic() - began
        if not stop.is_set():
            self._publish(request)
        receipt = Receipt(
            hit_tokens=cached,
            computed_tokens=len(prompt) - cached,
            pruned_tokens=0,
            exact=True,
            hit_tiers={"memory": cached, "disk": 0, "peer": 0},
            miss=None,
            holdings=Holdings(by_form={"int8": 4096}),
            peak_bytes=4096,
            evictions=(),
            preemptions=0,
            expires_at=None,
            pool="interactive",
            policy="int8",
        )
        emit(Finished(request_id, len(prompt), cached, generated, 0, 4096, 0.0, total / 2, total, receipt))

    def _look_up(self, request: GenerateRequest) -> int:
        prompt = request.prompt_token_ids
        self._queries += len(prompt)
        self._prompt += len(prompt)
        cached = 0
        if self.info.prefix_cache and request.params.prompt_logprobs is None:
            for end in range(PAGE_SIZE, len(prompt), PAGE_SIZE):
                if (request.tenant, request.cache_salt, prompt[:end].tobytes()) not in self._pages:
                    break
                cached = end
        self._hits += cached
        return cached

    def _publish(self, request: GenerateRequest) -> None:
        prompt = request.prompt_token_ids
        for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE):
            self._pages.add((request.tenant, request.cache_salt, prompt[:end].tobytes()))


class _ChoiceScript:
    """One choice's tokens, one by one."""

    def __init__(self, request: GenerateRequest, index: int, script: Script) -> None:
        self.index = index
        self.done = False
        self._request = request
        text, self._stop = script.reply, None
        for stop in request.params.stop:
            if stop in text and (self._stop is None or text.index(stop) < text.index(self._stop)):
                self._stop = stop
        self._text = text if self._stop is None else text[: text.index(self._stop)]
        self._tokens = list((self._text + (self._stop or "")).encode())
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def step(self) -> Delta:
        params, limit = self._request.params, self._request.params.max_tokens
        if limit == 0:
            self.done = True
            return Delta(self._request.request_id, self.index, "", (), (), "length")
        at_end = self._position == len(self._tokens)
        token = EOS if at_end else self._tokens[self._position]
        self._position += 1
        in_text = self._position <= len(self._text.encode())
        text = self._decoder.decode(bytes([token])) if in_text and not at_end else ""
        reason, stop_reason = None, None
        if at_end or (self._stop is not None and self._position == len(self._tokens)):
            reason, stop_reason = "stop", self._stop
        elif limit is not None and self._position >= limit:
            reason = "length"
        self.done = reason is not None
        entries = () if params.logprobs is None else (fake_logprob(token, params.logprobs),)
        return Delta(self._request.request_id, self.index, text, (token,), entries, reason, stop_reason)
