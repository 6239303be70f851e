"""The engine: one loop on its own thread, fed and read through plain messages."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from octavo.cache.manager import KVCache
from octavo.cache.pins import Pin, Pins
from octavo.cache.policy import Policy
from octavo.engine.admission import checked_max_tokens
from octavo.engine.answering import Answers
from octavo.engine.choosing import Chooser
from octavo.engine.client import I32, CacheReport, EngineInfo, EngineStats, ErasureReport, FrameMap
from octavo.engine.messages import Failed, GenerateRequest, Sink
from octavo.engine.outlet import Outlet
from octavo.engine.request import Request
from octavo.engine.runner import Runner
from octavo.engine.scheduler import Scheduler
from octavo.engine.snapshot import engine_stats, page_map
from octavo.errors import CloseTimeout, EngineStopped, OverloadedError, RequestError
from octavo.ops.base import Ops
from octavo.ops.profile import Profile
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")

log = logging.getLogger("octavo.engine")

#: How long `close` waits for the step in progress.
CLOSE_TIMEOUT_S = 30.0
#: How often an idle engine looks for pages whose time is over.
EXPIRY_PERIOD_S = 0.5


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
        pins: Pins,
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
        self._pins = pins
        self._max_queue = max_queue
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._n_pending = 0
        self._submitting = threading.Lock()
        self._stopped = False
        self._steps = 0
        self._closing = False
        self._died = False
        self._answers = Answers(tokenizer, cache, scheduler, on_over=self._one_over)
        self._chooser = Chooser(runner, ops, self._answers.alone)
        self._stats = self._snapshot()
        self._thread = threading.Thread(target=self._main, name="octavo-engine", daemon=True)
        self._thread.start()
        # A thread that is inside a kernel when the interpreter goes takes the process down with it.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

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
            self._inbox.put(_Submit(Request(request, Outlet(sink), max_tokens, eos)))

    def cancel(self, request_id: str) -> None:
        self._inbox.put(_Cancel(request_id))

    def stats(self) -> EngineStats:
        return self._stats

    def page_map(self) -> list[FrameMap]:
        # Only the copying is the engine's work.
        return page_map(self.call(self._cache.arena.snapshot, timeout_s=10.0), self._cache.classes)

    def apply_policy(self, policy: Policy) -> None:
        def apply() -> None:
            self._cache.tree.lifetime = policy.lifetime
            self._cache.quotas = policy.quotas(self.info.kv_memory_bytes)

        self.call(apply, timeout_s=30.0)

    def pin(self, tenant: str, salt: str, prompt: I32, ttl_s: float) -> Pin:
        return self.call(lambda: self._pins.add(self._scheduler.identity(tenant, salt), prompt, ttl_s), timeout_s=30.0)

    def unpin(self, tenant: str, pin_id: str) -> Pin | None:
        return self.call(lambda: self._pins.remove(tenant, pin_id), timeout_s=30.0)

    def erase(self, tenant: str, salt: str | None = None) -> ErasureReport:
        def erase() -> ErasureReport:
            requests = self._answers.erase(tenant, salt)
            self._pins.erase(tenant, salt)
            erasure = self._cache.erase(tenant, salt)
            keys = self._scheduler.forget_ghosts(tenant) if salt is None else 0
            return ErasureReport(erasure.pages, erasure.n_bytes, keys, erasure.pending, requests)

        return self.call(erase, timeout_s=30.0)

    def cache_report(self) -> CacheReport:
        def report() -> CacheReport:
            totals = self._answers.totals
            curve = self._scheduler.what_if(totals.hit_tokens, totals.query_tokens)
            fractions = {tenant: tuple(bins) for tenant, bins in totals.hit_fractions.items()}
            return CacheReport(totals.hit_tokens, totals.query_tokens, tuple(curve), fractions)

        return self.call(report, timeout_s=10.0)

    def is_healthy(self) -> bool:
        return not self._died and self._thread.is_alive()

    def close(self) -> None:
        """Fail what is in flight, end the thread, give the arena and the weights back. Again: the same, sooner.

        Raises CloseTimeout when the step in progress takes longer than CLOSE_TIMEOUT_S. The engine then counts as dead,
        and ends when the step does. From a sink, so on the engine's own thread, it returns at once, and the engine ends
        after the step.
        """
        self._closing = True
        atexit.unregister(self._at_exit)
        self._inbox.put(_Close())
        if threading.current_thread() is self._thread:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._died = True
            message = f"the engine did not end within {CLOSE_TIMEOUT_S:g} s; it does when the step in progress has"
            log.error(message)
            raise CloseTimeout(message)

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
                self._cache.expire()
                self._pins.expire()
                if self._scheduler.has_work():
                    with nullcontext() if self.profile is None else self.profile.step():
                        self._step()
                self._answers.fail_unheard()
                self._stats = self._snapshot()
        except BaseException:
            self._died = True
            log.exception("the engine's thread has died")
        finally:
            self._stop()

    def _step(self) -> None:
        step = self._scheduler.schedule()
        if not step:
            # Admission guarantees that the oldest sequence fits alone; if not, refuse it rather than spin.
            error = RequestError("the request does not fit into the cache")
            self._answers.fail(self._scheduler.waiting[0].request, error)
            return
        self._steps += 1
        for part, result in self._scheduler.isolated(step, self._runner.run, self._answers.fail):
            for item, entries in self._chooser.prompts(part, result):
                self._answers.take_prompt(item, entries)
            self._scheduler.commit([item for item in part if item.sequence.table is not None])
            for chosen in self._chooser.tokens(self._answers.due(part), result):
                self._answers.take(chosen.sequence, chosen.token, chosen.logprob)

    def _stop(self) -> None:
        """Answer everyone; only then give pages and memory back, which may fail after a death."""
        with self._submitting:
            self._stopped = True
        self._answers.fail_all(EngineStopped("the engine stopped before the request was done"))
        self._drain_after_stop()
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            with _logged("a sequence's pages could not be freed"):
                self._scheduler.finish(sequence)
        with _logged("the arena could not be given back"):
            self._ops.forget()
            self._cache.close()
        with _logged("the last figures could not be taken"):
            self._stats = self._snapshot()
        # The weights are theirs. Nothing but this thread has used them.
        del self._runner, self._chooser, self._ops

    # ---- messages ---------------------------------------------------------------------------------------

    def _receive(self, *, wait: bool) -> None:
        """Take what is there. With nothing else to do, wait for something, or until pages may have expired."""
        limit = EXPIRY_PERIOD_S if self._cache.tree.lifetime.is_limited or len(self._pins) else None
        while True:
            try:
                message = self._inbox.get(block=wait, timeout=limit if wait else None)
            except queue.Empty:
                return
            wait = False
            if isinstance(message, _Submit):
                self._answers.accept(message.request)
            elif isinstance(message, _Cancel):
                self._answers.cancel(message.request_id)
            elif isinstance(message, _Call):
                message.function()
            else:
                self._closing = True

    def _drain_after_stop(self) -> None:
        """Answer what was submitted while the engine stopped; nobody waits for ever."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, _Submit):
                self._one_over()
                error = EngineStopped("the engine has stopped")
                message.request.sink(Failed(message.request.message.request_id, error))
            elif isinstance(message, _Call):
                message.function()

    def _one_over(self) -> None:
        with self._submitting:
            self._n_pending -= 1

    def _snapshot(self) -> EngineStats:
        return engine_stats(
            self._cache,
            self._scheduler,
            self._answers.totals,
            generation_tokens=self._answers.generation_tokens,
            cascade_refused=self._ops.cascade_refused,
            steps=self._steps,
        )


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Go on after a fault."""
    try:
        yield
    except BaseException:
        log.exception(what)


def _close_at_exit(engine: weakref.ref[Engine]) -> None:
    """Whoever has not closed an engine when the interpreter ends has it closed then."""
    alive = engine()
    if alive is not None:
        with _logged("the engine could not be closed at exit"):
            alive.close()
