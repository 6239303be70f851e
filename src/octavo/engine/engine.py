"""The engine: one loop on its own thread, fed and read through plain messages."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from octavo.cache.manager import KVCache
from octavo.cache.pages import OPEN
from octavo.engine.admission import checked_max_tokens
from octavo.engine.client import EngineInfo, EngineStats
from octavo.engine.messages import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    PromptProgress,
    Sink,
)
from octavo.engine.output import ChoiceText
from octavo.engine.request import Request, Sequence, TokenBuffer
from octavo.engine.runner import PROMPT_LOGIT_ROWS, Runner, StepHidden
from octavo.engine.sampler import Sampler, token_logprob
from octavo.engine.scheduler import ScheduledSequence, Scheduler
from octavo.engine.snapshot import engine_stats, page_map
from octavo.errors import CodecRangeError, EngineStopped, OutOfPages, OverloadedError, RequestError
from octavo.ops.base import Ops
from octavo.ops.profile import Profile
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")

log = logging.getLogger("octavo.engine")

#: How long `close` waits for the step in progress.
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    """Run on the engine's thread, between steps."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Message = _Submit | _Cancel | _Call | _Close


class Engine:
    """Implements `octavo.engine.client.EngineClient`."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        ops: Ops,
        runner: Runner,
        cache: KVCache,
        scheduler: Scheduler,
        *,
        max_queue: int,
        profile: Profile | None = None,
    ) -> None:
        self.info = info
        self.profile = profile
        self.tokenizer = tokenizer
        self._ops = ops
        self._runner = runner
        self._cache = cache
        self._scheduler = scheduler
        self._max_queue = max_queue
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        self._n_pending = 0
        self._submitting = threading.Lock()
        self._stopped = False
        self._generation_tokens = 0
        self._steps = 0
        self._closing = False
        self._died: BaseException | None = None
        self._stats = self._snapshot()
        self._thread = threading.Thread(target=self._main, name="octavo-engine", daemon=True)
        self._thread.start()

    # ---- called from any thread -------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        max_tokens = checked_max_tokens(request, self.info)
        eos = frozenset() if request.params.ignore_eos else self.tokenizer.eos_token_ids
        # Under the lock, so that nothing enters the inbox after the engine's thread has emptied it for the last time.
        with self._submitting:
            if self._stopped or self._closing:
                raise EngineStopped("the engine has stopped")
            if self._n_pending >= self._max_queue + self.info.max_num_seqs:
                raise OverloadedError(
                    f"{self._n_pending} requests are queued or running, the limit is "
                    f"{self._max_queue} waiting beside {self.info.max_num_seqs} running",
                    retry_after_s=5,
                )
            self._n_pending += 1
            self._inbox.put(_Submit(Request(request, sink, max_tokens, eos)))

    def cancel(self, request_id: str) -> None:
        self._inbox.put(_Cancel(request_id))

    def stats(self) -> EngineStats:
        return self._stats

    def page_map(self) -> list[dict[str, object]]:
        return self.call(lambda: page_map(self._cache), timeout_s=10.0)

    def is_healthy(self) -> bool:
        return self._died is None and self._thread.is_alive()

    def close(self) -> None:
        """Fail what is in flight, end the thread, give the arena back."""
        self._closing = True
        self._inbox.put(_Close())
        self._thread.join(CLOSE_TIMEOUT_S)

    def call(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Run a function on the engine's thread between steps, where the cache is consistent."""
        done: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((function(), None))
            except Exception as error:  # noqa: BLE001 - handed to the caller
                done.put((None, error))

        with self._submitting:
            if self._stopped:
                raise EngineStopped("the engine has stopped")
            self._inbox.put(_Call(run))
        try:
            result, error = done.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineStopped(f"the engine did not answer within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    # ---- the engine's thread ----------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._closing:
                self._receive(wait=not self._scheduler.has_work())
                if self._scheduler.has_work():
                    with nullcontext() if self.profile is None else self.profile.step():
                        self._step()
                self._stats = self._snapshot()
        except Exception as error:
            self._died = error
            log.exception("the engine's thread has died")
        finally:
            with self._submitting:
                self._stopped = True
            for request in list(self._requests.values()):
                self._fail(request, EngineStopped("the engine stopped before the request was done"))
            self._drain_after_stop()
            self._cache.arena.close()

    def _step(self) -> None:
        step = self._scheduler.schedule()
        if not step:
            # Admission guarantees that the oldest sequence fits alone; if not, refuse it rather than spin.
            self._fail(self._scheduler.waiting[0].request, RequestError("the request does not fit into the cache"))
            return
        self._steps += 1
        try:
            result = self._runner.run(step)
        except CodecRangeError as error:
            self._isolate(step, error)
            return
        self._commit(step, result)

    def _commit(self, step: list[ScheduledSequence], result: StepHidden) -> None:
        for i, item in enumerate(step):
            if item.sequence.request.wants_prompt_logprobs and item.sequence.index == 0:
                with self._alone(item.sequence.request):
                    self._take_prompt_logprobs(item, result, i)
        alive = [item for item in step if item.sequence.table is not None]
        sampling = [i for i, item in enumerate(step) if item.sequence.table is not None and item.samples]
        prefilling = [item for item in alive if not item.sequence.n_generated and item.sequence.index == 0]
        self._scheduler.commit(alive)
        for item in prefilling:
            request = item.sequence.request
            done = min(item.sequence.num_computed_tokens, request.n_prompt)
            request.sink(PromptProgress(request.message.request_id, done, request.n_prompt))
        if not sampling:
            return
        logits = self._runner.last_logits(result, sampling)
        wanted = [k for k, i in enumerate(sampling) if step[i].sequence.request.message.params.logprobs is not None]
        logprobs = dict(zip(wanted, self._ops.log_softmax(logits[wanted]), strict=True)) if wanted else {}
        for k, i in enumerate(sampling):
            sequence = step[i].sequence
            if sequence.request.message.request_id not in self._requests:
                continue  # another choice has failed it just now
            with self._alone(sequence.request):
                for choice in self._choices(sequence):
                    self._append(choice, logits[k], logprobs.get(k))

    @contextmanager
    def _alone(self, request: Request) -> Iterator[None]:
        """Work on one request only: a fault in it ends that request, not the engine."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - handed to the request's sink
            self._fail(request, error)

    def _choices(self, sequence: Sequence) -> list[Sequence]:
        """The sequence itself, and after its prompt the request's other choices, forked from it."""
        request = sequence.request
        if sequence.n_generated or len(request.sequences) > 1 or request.message.params.n == 1:
            return [sequence]
        for index in range(1, request.message.params.n):
            child = self._new_sequence(request, index, sequence.sampler.seed)
            request.sequences.append(child)
            self._scheduler.fork(sequence, child)
        return list(request.sequences)

    def _append(self, sequence: Sequence, logits: np.ndarray, logprobs: np.ndarray | None) -> None:
        """Sample one token and emit what it brings."""
        request = sequence.request
        if request.max_tokens == 0:
            self._end(sequence, "", (), (), "length", None)
            return
        token = sequence.sampler.choose(logits, len(sequence.tokens))
        entry = () if logprobs is None else (token_logprob(logprobs, token, request.message.params.logprobs or 0),)
        sequence.tokens.append(token)
        sequence.n_generated += 1
        request.completion_tokens += 1
        self._generation_tokens += 1
        if request.first_token is None:
            request.first_token = time.monotonic()
        params = request.message.params
        if token in request.eos_token_ids or token in params.stop_token_ids:
            text = sequence.text.finish()
            self._end(sequence, text.text, (token,), entry, "stop", token if token in params.stop_token_ids else None)
            return
        emitted = sequence.text.push(token)
        if emitted.stop is not None:
            self._end(sequence, emitted.text, (token,), entry, "stop", emitted.stop)
        elif sequence.n_generated >= request.max_tokens:
            last = sequence.text.finish()
            reason: FinishReason = "length" if last.stop is None else "stop"
            self._end(sequence, emitted.text + last.text, (token,), entry, reason, last.stop)
        else:
            request.sink(Delta(request.message.request_id, sequence.index, emitted.text, (token,), entry))

    def _end(
        self,
        sequence: Sequence,
        text: str,
        tokens: tuple[int, ...],
        entries: tuple,  # type: ignore[type-arg]
        reason: FinishReason,
        stop: str | int | None,
    ) -> None:
        request = sequence.request
        self._note_bytes(request)
        sequence.finish_reason = reason
        self._scheduler.finish(sequence)
        request.sink(Delta(request.message.request_id, sequence.index, text, tokens, entries, reason, stop))
        if request.is_finished and len(request.sequences) >= (1 if reason == "cancelled" else request.message.params.n):
            self._finish(request)

    def _finish(self, request: Request) -> None:
        now = time.monotonic()
        admitted = request.admitted if request.admitted is not None else now
        self._forget(request)
        request.sink(
            Finished(
                request.message.request_id,
                request.n_prompt,
                request.num_cached_tokens or 0,
                request.completion_tokens,
                sum(s.preemptions for s in request.sequences),
                request.peak_kv_bytes,
                admitted - request.submitted,
                None if request.first_token is None else request.first_token - request.submitted,
                now - request.submitted,
            )
        )

    def _fail(self, request: Request, error: Exception) -> None:
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._scheduler.finish(sequence)
        self._forget(request)
        request.sink(Failed(request.message.request_id, error))

    def _forget(self, request: Request) -> None:
        if self._requests.pop(request.message.request_id, None) is not None:
            with self._submitting:
                self._n_pending -= 1

    def _isolate(self, step: list[ScheduledSequence], error: CodecRangeError) -> None:
        """A page of some sequence cannot be sealed. Run each alone, so that only that one fails: results are the
        same to the bit, alone or together."""
        self._scheduler.rollback(step)
        if len(step) == 1:
            self._fail(step[0].sequence.request, error)
            return
        for item in step:
            if item.sequence.table is None or item.sequence.finish_reason is not None:
                continue
            try:
                self._cache.reserve(item.sequence.table, item.n_tokens)
            except OutOfPages:
                continue  # a fork took the room; the scheduler comes back to this sequence
            try:
                result = self._runner.run([item])
            except CodecRangeError as own:
                self._scheduler.rollback([item])
                self._fail(item.sequence.request, own)
            else:
                self._commit([item], result)

    def _take_prompt_logprobs(self, item: ScheduledSequence, result: StepHidden, index: int) -> None:
        """Logits of row i predict token i + 1 of the prompt."""
        sequence, request = item.sequence, item.sequence.request
        n_top = request.message.params.prompt_logprobs or 0
        entries = request.prompt_logprobs
        start = sequence.num_computed_tokens
        prompt = request.message.prompt_token_ids
        if not entries:
            entries.append(None)
        # After a preemption the first rows are computed once more; their entries are there already.
        first = max(start, len(entries) - 1)
        end = min(start + item.n_tokens, request.n_prompt - 1)
        for row in range(first, end, PROMPT_LOGIT_ROWS):
            n = min(PROMPT_LOGIT_ROWS, end - row)
            logits = self._runner.logits(result, int(result.row_start[index]) + row - start, n)
            for i, logprobs in enumerate(self._ops.log_softmax(logits)):
                entries.append(token_logprob(logprobs, int(prompt[row + i + 1]), n_top))
        if start + item.n_tokens >= request.n_prompt and not sequence.n_generated:
            request.sink(PromptLogprobs(request.message.request_id, tuple(entries)))

    # ---- messages ---------------------------------------------------------------------------------------

    def _receive(self, *, wait: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if isinstance(message, _Submit):
                self._accept(message.request)
            elif isinstance(message, _Cancel):
                self._cancel_now(message.request_id)
            elif isinstance(message, _Call):
                message.function()
            else:
                self._closing = True

    def _accept(self, request: Request) -> None:
        if request.message.request_id in self._requests:
            with self._submitting:
                self._n_pending -= 1
            error = RequestError(f"request id {request.message.request_id!r} is in use", param="request_id")
            request.sink(Failed(request.message.request_id, error))
            return
        self._requests[request.message.request_id] = request
        with self._alone(request):
            params = request.message.params
            seed = params.seed if params.seed is not None else secrets.randbits(63)
            request.sequences.append(self._new_sequence(request, 0, seed))
            self._scheduler.add(request.sequences[0])

    def _new_sequence(self, request: Request, index: int, seed: int) -> Sequence:
        message = request.message
        return Sequence(
            request,
            index,
            TokenBuffer(message.prompt_token_ids),
            Sampler(message.params, seed, index, request.penalized_prompt_ids),
            ChoiceText(self.tokenizer, message.params.stop_strings),
        )

    def _cancel_now(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._end(sequence, "", (), (), "cancelled", None)

    def _drain_after_stop(self) -> None:
        """Answer what was submitted while the engine stopped; nobody waits for ever."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, _Submit):
                error = EngineStopped("the engine has stopped")
                message.request.sink(Failed(message.request.message.request_id, error))
            elif isinstance(message, _Call):
                message.function()

    # ---- numbers ----------------------------------------------------------------------------------------

    def _note_bytes(self, request: Request) -> None:
        """Bytes of the distinct pages that the request holds, at their most: taken when a choice ends."""
        pages = {
            page.handle: page
            for sequence in request.sequences
            if sequence.table is not None
            for page in (*sequence.table.pages, *([sequence.table.open_page] if sequence.table.open_page else []))
        }
        sizes = self._cache.footprint
        held = sum(sizes.open.page_bytes if p.page_class == OPEN else sizes.sealed.page_bytes for p in pages.values())
        request.peak_kv_bytes = max(request.peak_kv_bytes, held)

    def _snapshot(self) -> EngineStats:
        return engine_stats(
            self._cache,
            self._scheduler,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
        )
