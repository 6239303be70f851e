"""How an engine ends: everyone is answered, whatever else breaks, and its memory is given back."""

from __future__ import annotations

import gc
import logging
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.cache import integrity
from octavo.config import CachePolicy, EngineConfig
from octavo.engine import engine as engine_module
from octavo.engine.engine import Engine
from octavo.engine.messages import (
    Delta,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    PromptProgress,
    SamplingParams,
    Started,
)
from octavo.engine.outlet import without_frames
from octavo.engine.prompt import prompt_array
from octavo.errors import CloseTimeout, EngineStopped
from octavo.llm import LLM
from tests.server.scripted import Script, ScriptedEngine
from tests.support.tiny import tiny_engine

CONFIG = EngineConfig(
    threads=1, page_size=16, max_num_seqs=4, step_tokens=32, max_queue=16, policy=CachePolicy("int8", "int8")
)
LONG = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
SHORT = replace(LONG, max_tokens=8)


def submit(engine: Engine, name: str, params: SamplingParams = LONG, length: int = 20) -> queue.SimpleQueue[Event]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(GenerateRequest(name, prompt_array(range(length)), params), events.put)
    return events


def last(events: queue.SimpleQueue[Event]) -> Event:
    while not isinstance(event := events.get(timeout=10), Finished | Failed):
        pass
    return event


def broken(*_: Any) -> Any:
    raise RuntimeError("planted")


class TestDying:
    def test_pages_that_cannot_be_freed_keep_nobody_from_an_answer(self) -> None:
        engine = tiny_engine(CONFIG)
        events = [submit(engine, f"r{i}") for i in range(8)]
        assert isinstance(events[0].get(timeout=10), Started)
        engine._cache.release = broken  # type: ignore[method-assign]
        late: list[queue.SimpleQueue[Event]] = []

        def die() -> None:
            # In the inbox behind this message when the engine dies.
            late.append(submit(engine, "late"))
            engine._runner.run = broken  # type: ignore[method-assign]

        engine.call(die, timeout_s=10)
        for each in (*events, *late):
            failed = last(each)
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, EngineStopped)
        engine.close()
        assert not engine.is_healthy()
        assert engine._cache.arena.store.memory.size == 0, "the memory is given back all the same"

    def test_a_release_that_fails_in_the_midst_of_work(self) -> None:
        engine = tiny_engine(CONFIG)
        events = [submit(engine, "ends first", SHORT), submit(engine, "goes on")]
        engine._cache.release = broken  # type: ignore[method-assign]
        assert all(isinstance(last(each), Failed) for each in events)
        engine._thread.join(10)
        assert not engine.is_healthy(), "a cache that cannot free pages is not to be trusted"

    def test_a_sink_that_raises_keeps_nobody_from_an_answer(self) -> None:
        engine = tiny_engine(CONFIG)
        heard: list[Event] = []

        def sink(event: Event) -> None:
            heard.append(event)
            if isinstance(event, Failed):
                raise RuntimeError("planted")

        engine.submit(GenerateRequest("bad", prompt_array(range(20)), LONG), sink)
        events = [submit(engine, f"r{i}") for i in range(5)]
        engine._runner.run = broken  # type: ignore[method-assign]
        assert all(isinstance(last(each), Failed) for each in events)
        engine.close()
        assert sum(isinstance(event, Failed) for event in heard) == 1

    def test_calls_are_answered(self) -> None:
        engine = tiny_engine(CONFIG)
        engine._runner.run = broken  # type: ignore[method-assign]
        submit(engine, "r")
        began = time.monotonic()

        def until_refused() -> None:
            while time.monotonic() < began + 10:
                engine.page_map()

        with pytest.raises(EngineStopped):
            until_refused()
        assert time.monotonic() - began < 5

    def test_python_does_not_wait_for_an_engine_that_says_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("octavo.llm.POLL_S", 0.05)
        monkeypatch.setattr("octavo.llm.LAST_WORDS_S", 0.05)
        for ask in (
            lambda llm: llm.generate("abc", SamplingParams(max_tokens=4)),
            lambda llm: list(llm.stream("abc", SamplingParams(max_tokens=4))),
        ):
            scripted = ScriptedEngine()
            scripted.script = Script(prefill_gate=threading.Event())
            threading.Timer(0.2, scripted.die).start()
            with pytest.raises(EngineStopped):
                ask(LLM.from_engine(scripted))


class TestSinks:
    @pytest.mark.parametrize("at", [Started, PromptProgress, Delta, Finished])
    def test_one_that_raises_fails_its_own_request(self, at: type) -> None:
        engine = tiny_engine(CONFIG)
        heard: list[Event] = []
        over = threading.Event()

        def sink(event: Event) -> None:
            heard.append(event)
            if isinstance(event, at):
                over.set()
                raise RuntimeError("planted")
            if isinstance(event, Failed):
                over.set()

        mates = [submit(engine, f"r{i}", SHORT) for i in range(2)]
        engine.submit(GenerateRequest("bad", prompt_array(range(50)), SHORT), sink)
        mates += [submit(engine, "after", SHORT)]
        assert all(isinstance(last(each), Finished) for each in mates)
        assert over.wait(10)
        assert engine.call(lambda: (integrity.check(engine._cache), len(engine._cache.tables)), timeout_s=10) == ([], 0)
        assert engine.is_healthy()
        if at is not Finished:
            first = next(i for i, event in enumerate(heard) if isinstance(event, at))
            assert [type(event) for event in heard[first:]] == [at, Failed], "nothing between the fault and the end"
        engine.close()


class TestClosing:
    def test_again_and_after_a_death(self) -> None:
        engine = tiny_engine(CONFIG)
        engine.close()
        engine.close()
        dead = tiny_engine(CONFIG)
        dead._runner.run = broken  # type: ignore[method-assign]
        assert isinstance(last(submit(dead, "r")), Failed)
        dead.close()
        dead.close()

    def test_a_step_that_takes_too_long(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(engine_module, "CLOSE_TIMEOUT_S", 0.1)
        engine = tiny_engine(CONFIG)
        began, go = threading.Event(), threading.Event()
        run = engine._runner.run

        def slow(step: Any) -> Any:
            began.set()
            go.wait(10)
            return run(step)

        engine._runner.run = slow  # type: ignore[method-assign]
        events = submit(engine, "r")
        assert began.wait(10)
        with caplog.at_level(logging.ERROR, "octavo.engine"), pytest.raises(CloseTimeout, match=r"0\.1 s"):
            engine.close()
        assert "0.1 s" in caplog.text
        assert not engine.is_healthy(), "so that nobody goes on waiting for it"
        go.set()
        assert isinstance(last(events), Failed)
        engine.close()
        assert engine._cache.arena.store.memory.size == 0

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_memory_is_given_back(self, backend: str) -> None:
        """The LLM, its last output and a failed request's error are still alive."""
        engine = tiny_engine(replace(CONFIG, backend=backend))  # type: ignore[arg-type]
        llm = LLM.from_engine(engine)
        llm.generate(list(range(40)), SHORT)
        memory = engine._cache.arena.store.memory
        address, size = memory.ctypes.data, memory.size
        model, ops = weakref.ref(engine._runner._model), weakref.ref(engine._ops)
        del memory
        events = submit(engine, "r")
        engine.call(lambda: None, timeout_s=10)
        assert mapped(address, size)
        assert model() is not None
        assert ops() is not None
        llm.close()
        failed = last(events)
        assert isinstance(failed, Failed)
        gc.collect()
        assert not mapped(address, size)
        assert model() is None, "the weights are the model's"
        assert ops() is None

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_a_backend_that_outlives_the_engine_lets_go_of_the_arena(self, backend: str) -> None:
        engine = tiny_engine(replace(CONFIG, backend=backend))  # type: ignore[arg-type]
        ops = engine._ops
        with LLM.from_engine(engine) as llm:
            llm.generate(list(range(40)), SHORT)
            address, size = engine._cache.arena.store.memory.ctypes.data, engine._cache.arena.store.memory.size
            assert mapped(address, size)
        gc.collect()
        assert not mapped(address, size), f"{ops.name} holds the arena"

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_a_backend_that_has_forgotten_goes_on(self, backend: str) -> None:
        engine = tiny_engine(replace(CONFIG, backend=backend))  # type: ignore[arg-type]
        with LLM.from_engine(engine) as llm:
            engine.call(engine._ops.forget, timeout_s=10)  # before it has seen a batch
            first = llm.generate(list(range(40)), SHORT).outputs
            engine.call(engine._ops.forget, timeout_s=10)
            assert llm.generate(list(range(40)), SHORT).outputs == first

    def test_an_error_that_is_kept_holds_no_step(self) -> None:
        engine = tiny_engine(CONFIG)

        def choose(*_: Any) -> int:
            memory = engine._cache.arena.store.memory  # in this frame, as it is in those of a step
            raise RuntimeError(f"planted beside {memory.size} bytes")

        memory = engine._cache.arena.store.memory
        address, size = memory.ctypes.data, memory.size
        del memory
        make = engine._answers._new_sequence

        def planted(*args: Any) -> Any:
            sequence = make(*args)
            sequence.sampler.draw = choose
            return sequence

        engine._answers._new_sequence = planted  # type: ignore[method-assign]
        failed = last(submit(engine, "r"))
        assert isinstance(failed, Failed)
        assert "planted" in str(failed.error)
        engine.close()
        gc.collect()
        assert not mapped(address, size)


def mapped(address: int, size: int) -> bool:
    """Whether the process still has a mapping over all of these bytes."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address and address + size <= end:
            return True
    return False


def test_frames_are_dropped_along_the_chain() -> None:
    def fail() -> None:
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise RuntimeError("outer") from error

    try:
        fail()
    except RuntimeError as error:
        kept = error
    kept.__cause__.__cause__ = kept  # type: ignore[union-attr]  # a ring, which Python allows
    assert without_frames(kept) is kept
    assert kept.__traceback__ is None
    assert kept.__cause__ is not None
    assert kept.__cause__.__traceback__ is None


def test_choices_that_end_together_are_looked_at_once() -> None:
    """At distinct pages: eight choices share those of the prompt."""
    engine = tiny_engine(replace(CONFIG, max_num_seqs=16))
    cache, calls = engine._cache, []
    holdings = cache.holdings

    def counting(tables: Any) -> Any:
        calls.append(holdings(tables))
        return calls[-1]

    cache.holdings = counting  # type: ignore[method-assign]
    finished = last(submit(engine, "r", replace(SHORT, n=8), length=200))
    assert isinstance(finished, Finished)
    sealed, opened = cache.classes.sealed(0, cache.classes.default_form), cache.classes.opened(0)
    assert finished.kv_bytes == calls[0].n_bytes == 12 * sealed.page_bytes + 8 * opened.page_bytes
    assert len(calls) == 1
    engine.close()


def test_a_prompt_is_sorted_for_a_penalty_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many choices look at its distinct ids, and not at all where none does."""
    from octavo.engine import request as request_module

    longest: list[int] = []
    unique: Callable[..., Any] = request_module.np.unique

    def counting(array: Any, *args: Any, **kwargs: Any) -> Any:
        longest.append(len(array))
        return unique(array, *args, **kwargs)

    monkeypatch.setattr("numpy.unique", counting)
    with LLM.from_engine(tiny_engine(CONFIG)) as llm:
        tokens = [i % 50 for i in range(700)]
        llm.generate(tokens, replace(SHORT, n=4))
        assert longest == []
        llm.generate(tokens, replace(SHORT, n=4, repetition_penalty=1.3))
        assert sum(n >= 700 for n in longest) == 1


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_sink_that_raises_at_any_event_hears_the_end_and_hurts_nobody(error: type[BaseException]) -> None:
    """Also at its very last event, and whatever it raises."""
    engine = tiny_engine(CONFIG)
    alone = [type(e) for e in collected(submit_to(engine, "count", replace(SHORT, max_tokens=3)))]
    for k in range(len(alone)):
        heard: list[Any] = []
        done = threading.Event()

        def sink(event: Any, k: int = k, heard: list[Any] = heard, done: threading.Event = done) -> None:
            heard.append(event)
            if isinstance(event, Failed) or (isinstance(event, Finished) and k != len(heard) - 1):
                done.set()
            if len(heard) == k + 1:
                raise error("planted")

        engine.submit(GenerateRequest(f"bad-{k}", prompt_array(range(20)), replace(SHORT, max_tokens=3)), sink)
        mate = collected(submit_to(engine, f"mate-{k}", replace(SHORT, max_tokens=3)))
        assert isinstance(mate[-1], Finished)
        assert done.wait(10), f"after raising at event {k} it hears no end: {heard}"
        assert isinstance(heard[-1], Failed)
    assert engine.is_healthy()
    assert engine._n_pending == 0
    engine.close()


def submit_to(engine: Engine, name: str, params: SamplingParams) -> queue.SimpleQueue[Any]:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.submit(GenerateRequest(name, prompt_array(range(20)), params), events.put)
    return events


def collected(events: queue.SimpleQueue[Any]) -> list[Any]:
    result = [events.get(timeout=20)]
    while not isinstance(result[-1], Finished | Failed):
        result.append(events.get(timeout=20))
    return result


def test_close_from_a_sink_ends_the_engine() -> None:
    engine = tiny_engine(CONFIG)
    raised: list[BaseException] = []

    def sink(event: Any) -> None:
        try:
            engine.close()
        except BaseException as error:
            raised.append(error)
            raise

    engine.submit(GenerateRequest("r", prompt_array(range(20)), SHORT), sink)
    engine._thread.join(10)
    assert not engine._thread.is_alive()
    assert raised == []
    engine.close()
    assert engine.stats().requests_running == 0


LEAVE = """
import sys
from octavo import LLM, SamplingParams
from tests.support.tiny import tiny_engine
from octavo.config import EngineConfig
llm = LLM.from_engine(tiny_engine(EngineConfig(page_size=16)))
events = llm.stream(list(range(20)), SamplingParams(max_tokens=900, ignore_eos=True))
for _ in range(4):
    next(events)
{leave}
"""


@pytest.mark.parametrize(
    ("leave", "status"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('x')", 1), ("del llm", 0)]
)
def test_leaving_python_in_the_midst_of_a_step(leave: str, status: int) -> None:
    """Nobody closed the engine; the interpreter ends as it would have."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LEAVE.format(leave=leave)], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr


def test_more_prompts_than_the_queue_takes_and_iterators() -> None:
    with LLM.from_engine(tiny_engine(replace(CONFIG, max_queue=1, max_num_seqs=2))) as llm:
        many = llm.generate([[i, i + 1, i + 2] for i in range(20)], SHORT)
        assert len(many) == 20
        lazily = llm.generate(([i, i + 1, i + 2] for i in range(20)), SHORT)
        assert [o.outputs[0].token_ids for o in lazily] == [o.outputs[0].token_ids for o in many]
        one = llm.generate(iter([0, 1, 2]), SHORT)
        assert one.outputs[0].token_ids == many[0].outputs[0].token_ids
