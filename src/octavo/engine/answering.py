"""Requests in flight, from their acceptance to their last event: what becomes of each chosen token."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.cache.manager import KVCache
from octavo.cache.receipt import EvictionNote, Receipt, ReceiptTotals
from octavo.engine.choosing import Due
from octavo.engine.messages import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    PromptProgress,
    TokenLogprob,
)
from octavo.engine.outlet import log_fault, without_frames
from octavo.engine.output import ChoiceText
from octavo.engine.request import Request, Sequence, TokenBuffer
from octavo.engine.sampler import Sampler
from octavo.engine.scheduler import ScheduledSequence, Scheduler
from octavo.errors import OctavoError, RequestError
from octavo.text.tokenizer import Tokenizer


class Answers:
    """Rules:

    - After `accept` a request is in flight until it has finished or failed; each of the two is told once.
    - A fault in one request ends that request, not its neighbours. A fault in giving back pages is not one request's:
      it is raised, since the cache can no longer be trusted.
    - One thread.

    Args:
        on_over: called once for each accepted request, when it is over.
    """

    def __init__(
        self, tokenizer: Tokenizer, cache: KVCache, scheduler: Scheduler, *, on_over: Callable[[], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._cache = cache
        self._scheduler = scheduler
        self._on_over = on_over
        self._in_flight: dict[str, Request] = {}
        self.generation_tokens = 0
        self.totals = ReceiptTotals()

    # ---- requests come and go ---------------------------------------------------------------------------

    def accept(self, request: Request) -> None:
        """Give a request its first sequence; its other choices are forked from that one when the prompt is done."""
        request_id = request.message.request_id
        if request_id in self._in_flight:
            self._on_over()
            error = RequestError(f"request id {request_id!r} is in use", param="request_id")
            request.sink(Failed(request_id, error))
            return
        self._in_flight[request_id] = request
        with self.alone(request):
            params = request.message.params
            seed = params.seed if params.seed is not None else secrets.randbits(63)
            request.sequences.append(self._new_sequence(request, 0, seed))
            self._scheduler.add(request.sequences[0])

    def cancel(self, request_id: str) -> None:
        """End a request's choices as they stand. One that is unknown or over is ignored."""
        request = self._in_flight.get(request_id)
        if request is None:
            return
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._end(sequence, "cancelled")

    def fail(self, request: Request, error: Exception) -> None:
        """Tell the request, then give its pages back."""
        if self._forget(request):
            if not isinstance(error, OctavoError):
                log_fault(f"request {request.message.request_id} has failed", error)
            request.sink(Failed(request.message.request_id, without_frames(error)))
        for sequence in request.sequences:
            self._scheduler.finish(sequence)

    def fail_unheard(self) -> None:
        """Fail the requests whose sink has raised. Between steps, since a sink is called in the midst of things."""
        for request in list(self._in_flight.values()):
            if request.sink.error is not None:
                self.fail(request, request.sink.error)

    def fail_all(self, error: Exception) -> None:
        """Tell everyone. Pages are left alone: a cache that is broken must keep nobody from an answer."""
        for request in list(self._in_flight.values()):
            self._forget(request)
            request.sink(Failed(request.message.request_id, error))

    def erase(self, tenant: str, salt: str | None) -> int:
        """Requests in flight of a tenant (of one salt, if one is given) publish nothing from now on; how many."""
        erased = [r for r in self._in_flight.values() if r.message.tenant == tenant]
        erased = [r for r in erased if salt in (None, r.message.cache_salt)]
        for request in erased:
            request.erased = True
        if salt is None:
            self.totals.hit_fractions.pop(tenant, None)
        return len(erased)

    @contextmanager
    def alone(self, request: Request) -> Iterator[None]:
        """Work on one request only: a fault in it ends that request, not the engine."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - handed to the request's sink
            self.fail(request, error)

    # ---- a step's results -------------------------------------------------------------------------------

    def take_prompt(self, item: ScheduledSequence, entries: list[TokenLogprob]) -> None:
        """The log-probabilities of the next prompt tokens, before the step is committed."""
        request = item.sequence.request
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        request.prompt_logprobs.extend(entries)
        if item.sequence.num_computed_tokens + item.n_tokens >= request.n_prompt and not item.sequence.n_generated:
            request.sink(PromptLogprobs(request.message.request_id, tuple(request.prompt_logprobs)))

    def due(self, step: list[ScheduledSequence]) -> list[Due]:
        """The step has been committed: tell of progress, and say which sequences now want a token. At the end of a
        prompt these are all of the request's choices; one that asked for no token at all is over instead."""
        result: list[Due] = []
        for i, item in enumerate(step):
            sequence, request = item.sequence, item.sequence.request
            if sequence.table is None:
                continue  # failed while its results were read
            request.holds_more = True
            if not sequence.n_generated and sequence.index == 0:
                done = min(sequence.num_computed_tokens, request.n_prompt)
                request.sink(PromptProgress(request.message.request_id, done, request.n_prompt))
            if sequence.num_remaining_tokens:
                continue
            with self.alone(request):
                choices = self._choices(sequence)
                if request.max_tokens:
                    result.append(Due(i, choices))
                else:
                    for choice in choices:
                        self._end(choice, "length")
        return result

    def take(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """One more token of a choice. Of a request that is over since the token was chosen it is dropped."""
        if self._in_flight.get(sequence.request.message.request_id) is sequence.request:
            with self.alone(sequence.request):
                self._append(sequence, token, () if logprob is None else (logprob,))

    def _append(self, sequence: Sequence, token: int, entries: tuple[TokenLogprob, ...]) -> None:
        request, params = sequence.request, sequence.request.message.params
        sequence.tokens.append(token)
        sequence.n_generated += 1
        request.completion_tokens += 1
        self.generation_tokens += 1
        if request.first_token is None:
            request.first_token = time.monotonic()
        if token in request.eos_token_ids or token in params.stop_token_ids:
            text = sequence.text.finish().text
            self._end(sequence, "stop", token if token in params.stop_token_ids else None, text, (token,), entries)
            return
        emitted = sequence.text.push(token)
        if emitted.stop is not None:
            self._end(sequence, "stop", emitted.stop, emitted.text, (token,), entries)
        elif sequence.n_generated >= request.max_tokens:
            last = sequence.text.finish()
            reason: FinishReason = "length" if last.stop is None else "stop"
            self._end(sequence, reason, last.stop, emitted.text + last.text, (token,), entries)
        else:
            request.sink(Delta(request.message.request_id, sequence.index, emitted.text, (token,), entries))

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

    def _new_sequence(self, request: Request, index: int, seed: int) -> Sequence:
        message = request.message
        return Sequence(
            request,
            index,
            TokenBuffer(message.prompt_token_ids),
            Sampler(message.params, seed, index, request.penalized_prompt_ids),
            ChoiceText(self._tokenizer, message.params.stop_strings),
        )

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop: str | int | None = None,
        text: str = "",
        tokens: tuple[int, ...] = (),
        entries: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """A choice is over, with the last that it has to say."""
        request = sequence.request
        self._note_holdings(request)
        sequence.finish_reason = reason
        self._scheduler.finish(sequence)
        request.sink(Delta(request.message.request_id, sequence.index, text, tokens, entries, reason, stop))
        if request.is_finished and len(request.sequences) >= (1 if reason == "cancelled" else request.message.params.n):
            self._finish(request)

    def _finish(self, request: Request) -> None:
        now = time.monotonic()
        admitted = request.admitted if request.admitted is not None else now
        self._forget(request)
        receipt = self._receipt(request)
        self.totals.add(receipt, request.message.tenant)
        request.sink(
            Finished(
                request.message.request_id,
                request.n_prompt,
                request.num_cached_tokens or 0,
                request.completion_tokens,
                receipt.preemptions,
                request.peak_kv_bytes,
                admitted - request.submitted,
                None if request.first_token is None else request.first_token - request.submitted,
                now - request.submitted,
                receipt,
            )
        )

    def _receipt(self, request: Request) -> Receipt:
        hit = request.num_cached_tokens
        evicted = request.evicted_tokens
        return Receipt(
            hit_tokens=hit or 0,
            computed_tokens=0 if hit is None else request.n_prompt - hit,
            pruned_tokens=0,
            exact=True,
            hit_tiers={"memory": hit or 0, "disk": 0, "peer": 0},
            miss=request.miss,
            holdings=request.holdings,
            peak_bytes=request.peak_kv_bytes,
            evictions=(EvictionNote("pressure", evicted, self._cache.tree.policy.name),) if evicted else (),
            preemptions=sum(s.preemptions for s in request.sequences),
            expires_at=None if request.expires_at is None else time.time() + request.expires_at - time.monotonic(),
            pool="interactive",
            policy=self._cache.classes.default_form,
        )

    def _forget(self, request: Request) -> bool:
        """Whether the request was in flight until now."""
        if self._in_flight.get(request.message.request_id) is not request:
            return False
        del self._in_flight[request.message.request_id]
        self._on_over()
        return True

    def _note_holdings(self, request: Request) -> None:
        """What the request holds: looked at when a choice ends, once for all that end together."""
        if request.holds_more:
            request.holds_more = False
            tables = (s.table for s in request.sequences if s.table is not None)
            request.holdings = self._cache.holdings(tables)
            nodes = [s.table.node for s in request.sequences if s.table is not None and s.table.node is not None]
            if nodes and self._cache.tree.lifetime.is_limited:
                request.expires_at = max(node.expires_at for node in nodes)
            request.peak_kv_bytes = max(request.peak_kv_bytes, request.holdings.n_bytes)
