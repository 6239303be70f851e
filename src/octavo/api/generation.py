"""From the engine's thread to the event loop: one `Generation` per HTTP request, cancelled when nobody
listens."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from starlette.types import Receive

from octavo.api.errors import ApiError, ClientGone, unavailable
from octavo.api.metrics import Metrics, RequestTimer
from octavo.engine.client import EngineClient
from octavo.engine.messages import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    TokenLogprob,
)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Idle:
    """No event came for a while; the request goes on."""


class Generation:
    """Engine requests that answer one HTTP request (one per prompt), read as a single stream of events.

    A context manager: leaving it cancels what has not ended. Lives on the event loop; only `_deliver` is
        called from the engine's thread.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        engine: EngineClient,
        metrics: Metrics,
        live: set[Generation],
    ) -> None:
        self.requests = tuple(requests)
        self._live = live
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[Event, float]] = deque()
        self._arrival = asyncio.Event()
        self._timers = {r.request_id: RequestTimer(metrics, r) for r in requests}

    def submit(self) -> None:
        """Hand all requests to the engine, or none. Raises RequestError and OverloadedError."""
        for position, request in enumerate(self.requests):
            try:
                self._engine.submit(request, self._deliver)
            except Exception:
                for unsent in self.requests[position:]:
                    del self._timers[unsent.request_id]
                self.close()
                raise
        self._live.add(self)

    def _deliver(self, event: Event) -> None:
        arrived = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._append, event, arrived)
        except RuntimeError:  # the loop is closed: the server has gone, and this request with it
            self._engine.cancel(event.request_id)

    def _append(self, event: Event, at: float) -> None:
        self._arrived.append((event, at))
        self._arrival.set()

    async def _wait(self, timeout_s: float | None) -> bool:
        """True once an event is there, False when none came in time."""
        if self._arrived:
            return True
        self._arrival.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrival.wait()
        except TimeoutError:
            return False
        return True

    async def admitted(self, timeout_s: float) -> None:
        """Wait for the first event, but no longer than `timeout_s`. Raises the error if that event is one, so
        that a stream can still answer with its status."""
        if await self._wait(timeout_s) and isinstance(self._arrived[0][0], Failed):
            async for _ in self.events():
                pass

    async def events(self, *, idle_s: float | None = None) -> AsyncIterator[Event | Idle]:
        """Events until every request has finished, and an Idle whenever none came for `idle_s`.

        Raises the error of the first request that fails.
        """
        while self._timers:
            if not await self._wait(idle_s):
                yield Idle()
                continue
            event, at = self._arrived.popleft()
            timer = self._timers.get(event.request_id)
            if timer is None:
                continue
            timer.observe(event, at)
            if isinstance(event, Finished | Failed):
                del self._timers[event.request_id]
            if isinstance(event, Failed):
                # A dying engine fails what it still knows of; clients are told why, not how.
                raise event.error if self._engine.is_healthy() else engine_dead()
            if isinstance(event, Delta) and event.finish_reason == "cancelled":
                raise ApiError(503, "the request was cancelled by the server", code="request_cancelled")
            yield event

    def fail(self, error: Exception) -> None:
        """Stop, and end the stream with `error` once what has already arrived is read."""
        for request_id in self._timers:
            self._append(Failed(request_id, error), time.monotonic())
            self._engine.cancel(request_id)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop what is still running in the engine. Events that come later are dropped."""
        self._live.discard(self)
        for request_id, timer in self._timers.items():
            timer.abort()
            self._engine.cancel(request_id)
        self._timers.clear()


class Generations:
    """All generations in flight, so that a dead engine or a shutdown can end each of them."""

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._live: set[Generation] = set()
        self.draining = False

    def open(self, requests: Sequence[GenerateRequest]) -> Generation:
        """Raises ApiError (503) when the server is shutting down or its engine is dead, else what submit
        raises."""
        if self.draining:
            raise shutting_down()
        if not self._engine.is_healthy():
            raise engine_dead()
        generation = Generation(requests, self._engine, self._metrics, self._live)
        generation.submit()
        return generation

    def drain(self) -> None:
        """From now on every new generation is refused; those in flight go on."""
        self.draining = True

    def fail_all(self, error: Exception) -> None:
        for generation in list(self._live):
            generation.fail(error)

    async def watch_engine(self, period_s: float) -> None:
        """Runs while the server does: a dead engine sends no event, so its requests are ended from here."""
        while True:
            await asyncio.sleep(period_s)
            if self._live and not self._engine.is_healthy():
                self.fail_all(engine_dead())

    def __len__(self) -> int:
        return len(self._live)


def shutting_down() -> ApiError:
    return unavailable("the server is shutting down", retry_after_s=10, code="shutting_down")


def engine_dead() -> ApiError:
    return unavailable("the engine has stopped; the server's log has the reason", retry_after_s=30, code="engine_dead")


@dataclass(slots=True)
class Choice:
    """One finished choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.finish_reason else self.stop_reason


@dataclass(slots=True)
class Answer:
    """All that one engine request produced."""

    choices: list[Choice]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finished: Finished | None = None


async def collect(generation: Generation) -> dict[str, Answer]:
    """Read a generation to its end: request id -> answer, in the order of the requests."""
    answers = {r.request_id: Answer([Choice() for _ in range(r.params.n)]) for r in generation.requests}
    async for event in generation.events():
        if isinstance(event, Idle):
            continue
        answer = answers[event.request_id]
        if isinstance(event, Delta):
            answer.choices[event.index].add(event)
        elif isinstance(event, PromptLogprobs):
            answer.prompt_logprobs = event.entries
        elif isinstance(event, Finished):
            answer.finished = event
    return answers


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await `work`, but cancel it and raise ClientGone as soon as the client closes the connection.

    The body of the request must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
