"""The engine's edges: limits, cancelling, stop conditions, queueing, failures. On a tiny model."""

from __future__ import annotations

import queue
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.cache import integrity
from octavo.config import CachePolicy, EngineConfig, parse_bytes
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
from octavo.engine.prompt import prompt_array
from octavo.errors import CodecRangeError, ConfigError, EngineStopped, OverloadedError, RequestError
from octavo.llm import LLM
from tests.support.tiny import tiny_engine, tiny_spec

CONFIG = EngineConfig(
    threads=1, page_size=16, max_num_seqs=4, step_tokens=32, max_queue=4, policy=CachePolicy("int8", "int8")
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = tiny_engine(CONFIG)
    yield engine
    assert engine.is_healthy()
    assert engine.call(lambda: integrity.check(engine._cache), timeout_s=10) == []
    engine.close()


@pytest.fixture
def llm(engine: Engine) -> LLM:
    return LLM.from_engine(engine)


def submit(
    engine: Engine, tokens: list[int], params: SamplingParams = GREEDY, name: str = "r"
) -> queue.SimpleQueue[Event]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(GenerateRequest(name, prompt_array(tokens), params), events.put)
    return events


def until_over(events: queue.SimpleQueue[Event]) -> list[Event]:
    seen: list[Event] = []
    while not seen or not isinstance(seen[-1], Finished | Failed):
        seen.append(events.get(timeout=30))
    return seen


def idle(engine: Engine) -> None:
    deadline = time.monotonic() + 10
    while engine.stats().requests_running or engine.stats().requests_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestLimits:
    def test_lengths_around_the_context(self, engine: Engine, llm: LLM) -> None:
        limit = engine.info.max_model_len
        for n_prompt, max_tokens in ((limit - 1, 1), (limit - 9, 9), (limit, 0)):
            output = llm.generate(
                prompt(n_prompt), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            )
            assert len(output.outputs[0].token_ids) == max_tokens
        for n_prompt, max_tokens in ((limit, 1), (limit + 1, 0), (limit + 1, 1), (limit - 1, 2), (10, limit)):
            with pytest.raises(RequestError) as caught:
                llm.generate(prompt(n_prompt), SamplingParams(max_tokens=max_tokens))
            assert caught.value.code == "context_length_exceeded"
            assert str(limit) in str(caught.value)
            assert str(n_prompt) in str(caught.value)

    def test_max_tokens_left_open_ends_at_the_context(self, llm: LLM) -> None:
        limit = llm.engine.info.max_model_len
        output = llm.generate(prompt(limit - 5), SamplingParams(temperature=0, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 5
        assert output.outputs[0].finish_reason == "length"

    @pytest.mark.parametrize("tokens", [[], [260], [-1], [5, 1 << 40]])
    def test_bad_tokens(self, engine: Engine, tokens: list[int]) -> None:
        with pytest.raises(RequestError) as caught:
            submit(engine, tokens)
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize(
        "field", [{"logit_bias": {260: 1.0}}, {"stop_token_ids": (-1,)}, {"stop_token_ids": (999,)}]
    )
    def test_bad_tokens_in_parameters(self, engine: Engine, field: dict[str, Any]) -> None:
        with pytest.raises(RequestError) as caught:
            submit(engine, [1], SamplingParams(**field))
        assert caught.value.param == next(iter(field))

    def test_a_full_queue_refuses_and_recovers(self, engine: Engine) -> None:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        accepted = [submit(engine, prompt(10), params, f"r{i}") for i in range(8)]
        with pytest.raises(OverloadedError) as caught:
            submit(engine, prompt(10), params, "one too many")
        assert caught.value.retry_after_s > 0
        for events in accepted:
            assert isinstance(until_over(events)[-1], Finished)
        assert isinstance(until_over(submit(engine, prompt(10)))[-1], Finished)

    def test_a_request_id_in_use_fails_alone(self, engine: Engine) -> None:
        first = submit(engine, prompt(10), SamplingParams(max_tokens=50, ignore_eos=True))
        second = until_over(submit(engine, prompt(10)))
        assert isinstance(second[-1], Failed)
        assert isinstance(until_over(first)[-1], Finished)

    def test_budget_too_small(self) -> None:
        with pytest.raises(ConfigError, match="--kv-memory"):
            tiny_engine(EngineConfig(kv_memory_bytes=1000))

    @pytest.mark.parametrize(
        ("text", "n"), [("64MiB", 64 << 20), ("1.5GB", 1_500_000_000), ("512", 512), ("2 gib", 2 << 30)]
    )
    def test_sizes(self, text: str, n: int) -> None:
        assert parse_bytes(text) == n

    @pytest.mark.parametrize("text", ["", "MiB", "-1GiB", "1 XB", "1e9", "nan", "0", "0MiB", "99999999999999999999TiB"])
    def test_not_sizes(self, text: str) -> None:
        with pytest.raises(ConfigError):
            parse_bytes(text)


class TestEnding:
    def test_events_come_in_order(self, engine: Engine) -> None:
        events = until_over(submit(engine, prompt(70)))
        kinds = [type(e) for e in events]
        assert kinds[0] is Started
        assert [e.done_tokens for e in events if isinstance(e, PromptProgress)] == [32, 64, 70]
        assert kinds[4:-1] == [Delta] * 8
        assert [d.finish_reason for d in events[4:-1]] == [None] * 7 + ["length"]  # type: ignore[union-attr]
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert (finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens) == (70, 0, 8)
        assert finished.first_token_s is not None
        assert 0 <= finished.queued_s <= finished.first_token_s <= finished.total_s

    def test_eos_and_stop_tokens(self, llm: LLM) -> None:
        free = llm.generate(prompt(20), GREEDY).outputs[0]
        stop = free.token_ids[3]
        first = free.token_ids.index(stop)
        stopped = llm.generate(
            prompt(20), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=(stop,))
        ).outputs[0]
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        ended = llm.generate(prompt(20), SamplingParams(temperature=0, max_tokens=8, logit_bias={257: 100.0})).outputs[
            0
        ]
        assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([257], "", "stop", None)

    def test_stop_strings(self, llm: LLM) -> None:
        """Forced text, so that the stop string spans tokens."""

        def forced(stop: tuple[str, ...], text: str = "abcabd") -> Any:
            return llm.generate(
                text,
                SamplingParams(temperature=0, max_tokens=12, stop=stop, logit_bias={ord("x"): 100.0}, ignore_eos=True),
            ).outputs[0]

        assert forced(()).text == "x" * 12
        stopped = forced(("xxx",))
        assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", "xxx")
        assert len(stopped.token_ids) == 3
        held = forced(("xxxxxxxxxxxxxy",))
        assert (held.text, held.finish_reason) == ("x" * 12, "length")

    def test_nothing_to_generate(self, llm: LLM) -> None:
        output = llm.generate(prompt(40), SamplingParams(max_tokens=0))
        assert (output.text, output.completion_tokens, output.outputs[0].finish_reason) == ("", 0, "length")
        assert llm.generate(prompt(40), GREEDY).cached_tokens == 32

    def test_an_unfinished_character_is_not_shown(self, llm: LLM) -> None:
        output = llm.generate(
            [65], SamplingParams(temperature=0, max_tokens=1, logit_bias={0xE2: 100.0}, ignore_eos=True)
        )
        assert (output.text, output.outputs[0].token_ids) == ("", [0xE2])


class TestCancel:
    def test_while_waiting_running_and_over(self, engine: Engine) -> None:
        long = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
        running = [submit(engine, prompt(10, i), long, f"run{i}") for i in range(4)]
        waiting = submit(engine, prompt(10), long, "waiting")
        assert isinstance(running[0].get(timeout=10), Started)
        for name in ("waiting", "run0", "run1", "run2", "run3", "run0", "unknown"):
            engine.cancel(name)
        for events in (*running, waiting):
            seen = until_over(events)
            assert isinstance(seen[-1], Finished)
            assert isinstance(seen[-2], Delta)
            assert seen[-2].finish_reason == "cancelled"
        idle(engine)
        assert engine.stats().pages_active(is_open=True) == 0
        assert engine.stats().pages_active(is_open=False) == 0

    def test_in_the_middle_of_a_prompt(self, engine: Engine) -> None:
        events = submit(engine, prompt(900))
        while not isinstance(events.get(timeout=10), PromptProgress):
            pass
        engine.cancel("r")
        assert isinstance(until_over(events)[-1], Finished)
        idle(engine)
        assert engine.stats().pages_active(is_open=False) == 0
        again = until_over(submit(engine, prompt(900)))
        assert isinstance(again[0], Started)
        assert again[0].cached_tokens % 32 == 0, "whole steps were published, nothing half done"

    def test_choices_that_were_forked(self, engine: Engine) -> None:
        events = submit(engine, prompt(30), SamplingParams(max_tokens=500, n=3, ignore_eos=True))
        while not isinstance(events.get(timeout=10), Delta):
            pass
        engine.cancel("r")
        seen = until_over(events)
        assert [d.index for d in seen if isinstance(d, Delta) and d.finish_reason == "cancelled"] == [0, 1, 2]
        assert isinstance(seen[-1], Finished)

    def test_leaving_a_stream(self, llm: LLM) -> None:
        for event in llm.stream(prompt(10), SamplingParams(max_tokens=500, ignore_eos=True)):
            if isinstance(event, Delta):
                break
        idle(llm.engine)  # type: ignore[arg-type]

    def test_closing_fails_what_is_in_flight(self) -> None:
        engine = tiny_engine(CONFIG)
        events = submit(engine, prompt(10), SamplingParams(max_tokens=900, ignore_eos=True))
        engine.close()
        assert isinstance(until_over(events)[-1], Failed)
        with pytest.raises(Exception, match="stopped"):
            submit(engine, prompt(10))


def test_a_page_that_cannot_be_sealed_fails_its_request_alone() -> None:
    """f16 cannot hold the keys of this model at some prompts; their batch mates must not notice."""
    spec = tiny_spec(qkv_bias=True)
    policy = CachePolicy("f16", "f16")
    engine = tiny_engine(EngineConfig(threads=1, page_size=16, policy=policy), spec=spec)
    with LLM.from_engine(engine) as llm:
        good = llm.generate(prompt(40), GREEDY)
        original = engine._runner.run

        def poisoned(step: Any) -> Any:
            if any(item.sequence.request.message.request_id == "bad" for item in step):
                raise CodecRangeError("codec f16: a value is beyond its range")
            return original(step)

        engine._runner.run = poisoned  # type: ignore[method-assign]
        mates = [submit(engine, prompt(40, i), GREEDY, f"good{i}") for i in range(3)]
        bad = submit(engine, prompt(40), GREEDY, "bad")
        failed = until_over(bad)[-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, CodecRangeError)
        for events in mates:
            assert isinstance(until_over(events)[-1], Finished)
        assert llm.generate(prompt(40), GREEDY).outputs[0].token_ids == good.outputs[0].token_ids
        assert engine.call(lambda: integrity.check(engine._cache), timeout_s=10) == []


def test_a_death_of_the_thread_is_seen_and_answered() -> None:
    engine = tiny_engine(CONFIG)

    def broken(step: Any) -> Any:
        raise RuntimeError("planted")

    engine._runner.run = broken  # type: ignore[method-assign]
    assert isinstance(until_over(submit(engine, prompt(10)))[-1], Failed)
    engine._thread.join(10)
    assert not engine.is_healthy()
    with pytest.raises(Exception, match="stopped"):
        submit(engine, prompt(10))


def test_a_fault_in_one_request_ends_that_request_alone() -> None:
    engine = tiny_engine(CONFIG)
    with LLM.from_engine(engine) as llm:
        good = llm.generate(prompt(40), GREEDY)
        accept = engine._answers._new_sequence

        def planted(request: Any, index: int, seed: int) -> Any:
            sequence = accept(request, index, seed)
            if request.message.request_id == "bad at sampling":
                sequence.sampler.draw = None
            if request.message.request_id == "bad at once":
                raise IndexError("planted")
            return sequence

        engine._answers._new_sequence = planted  # type: ignore[method-assign]
        mates = [submit(engine, prompt(40, i), GREEDY, f"good{i}") for i in range(2)]
        for name in ("bad at sampling", "bad at once"):
            assert isinstance(until_over(submit(engine, prompt(40), GREEDY, name))[-1], Failed)
        assert all(isinstance(until_over(events)[-1], Finished) for events in mates)
        assert llm.generate(prompt(40), GREEDY).outputs[0].token_ids == good.outputs[0].token_ids
        assert engine.call(lambda: integrity.check(engine._cache), timeout_s=10) == []
        assert engine.stats().pages_active(is_open=True) == 0


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    engine = tiny_engine(CONFIG)
    with LLM.from_engine(engine) as llm:
        params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
        good = [llm.generate(prompt(40, i), params) for i in range(2)]
        last_logits = engine._runner.last_logits

        def planted(result: Any, items: list[int]) -> Any:
            logits = last_logits(result, items)
            if len(items) == 3:  # the first two requests beside the last
                logits[2, 100] = np.nan
            return logits

        engine._runner.last_logits = planted  # type: ignore[method-assign]
        mates: list[Any] = []

        def submit_together() -> None:
            mates.extend(submit(engine, prompt(40, i), params, f"good{i}") for i in range(2))
            mates.append(submit(engine, prompt(40, 2), params, "bad"))

        engine.call(submit_together, timeout_s=10)
        seen = [until_over(events) for events in mates]
        failed = seen[2][-1]
        assert isinstance(failed, Failed)
        assert "not finite" in str(failed.error)
        for events, alone in zip(seen, good, strict=False):
            assert [t for e in events if isinstance(e, Delta) for t in e.token_ids] == alone.outputs[0].token_ids
        assert engine.call(lambda: integrity.check(engine._cache), timeout_s=10) == []


class TestTogether:
    def test_one_prefix_is_computed_once(self) -> None:
        prefix, tails = prompt(200), [prompt(5, 50 + i) for i in range(8)]
        config = replace(CONFIG, max_num_seqs=8, max_queue=16, step_tokens=512)
        with LLM.from_engine(tiny_engine(config)) as llm:
            outputs = llm.generate([prefix + tail for tail in tails], GREEDY)
            assert [o.cached_tokens for o in outputs] == [0] + [192] * 7
            alone = [llm.generate(prefix + tail, GREEDY, cache_salt=f"{i}") for i, tail in enumerate(tails)]
            assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
            assert all(o.cached_tokens == 0 for o in alone), "salts share nothing"
            assert llm.stats().prompt_tokens == 16 * 205

    def test_followers_of_a_cancelled_leader_go_on(self, engine: Engine) -> None:
        leader = submit(engine, prompt(900), GREEDY, "leader")
        followers = [submit(engine, prompt(900), GREEDY, f"follower{i}") for i in range(2)]
        while not isinstance(leader.get(timeout=10), PromptProgress):
            pass
        engine.cancel("leader")
        seen = [until_over(events) for events in followers]
        assert all(isinstance(events[-1], Finished) for events in seen)
        assert isinstance(seen[1][0], Started)
        assert seen[1][0].cached_tokens == 896

    def test_nobody_waits_where_nothing_is_shared(self) -> None:
        config = replace(CONFIG, step_tokens=512, policy=CachePolicy("int8", "int8", prefix_cache=False))
        with LLM.from_engine(tiny_engine(config)) as llm:
            llm.generate([prompt(100)] * 4, replace(GREEDY, max_tokens=1))
            assert llm.stats().steps == 1


class TestTypes:
    @pytest.mark.parametrize(
        "field",
        [
            {"seed": 1.5}, {"top_k": 2.5}, {"logprobs": 2.0}, {"logprobs": True}, {"stop": (5,)}, {"stop": 5},
            {"prompt_logprobs": 2.5}, {"repetition_penalty": 1e-40}, {"temperature": "1"}, {"temperature": None},
            {"n": 2.0}, {"max_tokens": 2.5}, {"logit_bias": {"5": 1}}, {"logit_bias": [1]}, {"stop_token_ids": "ab"},
            {"stop_token_ids": (1.0,)}, {"top_p": float("nan")},
        ],
    )  # fmt: skip
    def test_parameters(self, field: dict[str, Any]) -> None:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**field)
        assert caught.value.param == next(iter(field))

    def test_one_stop_string(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=9, stop="xx", logit_bias={ord("x"): 100.0}, ignore_eos=True)
        assert llm.generate([1, 2], params).outputs[0].stop_reason == "xx"

    def test_prompts(self, llm: LLM) -> None:
        want = llm.generate([1, 2, 3], GREEDY).outputs[0].token_ids
        for ids in (np.array([1, 2, 3]), (1, 2, 3), [np.int64(1), np.int32(2), 3]):
            assert llm.generate(ids, GREEDY).outputs[0].token_ids == want
        assert len(llm.generate([[1, 2], "ab", np.array([3])], GREEDY)) == 3
        for wrong in ([[1.5, 2.7]], [True, False], b"hi", None, [None], 5, [["a"]]):
            with pytest.raises(RequestError):
                llm.generate(wrong, GREEDY)  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            llm.generate([1], GREEDY, cache_salt=["a"])  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "field",
        [
            {"backend": "foo"}, {"isa": "sse"}, {"threads": 1.5}, {"threads": 100_000}, {"threads": -1},
            {"kv_memory_bytes": 0}, {"kv_memory_bytes": 1.5}, {"page_size": 33}, {"max_model_len": 1},
            {"max_num_seqs": 0}, {"step_tokens": 0}, {"policy": "int4"},
        ],
    )  # fmt: skip
    def test_settings(self, field: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(field))):
            EngineConfig(**field)

    def test_memory_that_the_machine_lacks(self) -> None:
        with pytest.raises(ConfigError, match="free"):
            tiny_engine(EngineConfig(kv_memory_bytes=100 << 40))


def test_a_closed_engine_answers_at_once() -> None:
    engine = tiny_engine(CONFIG)
    engine.close()
    began = time.monotonic()
    for ask in (engine.page_map, lambda: submit(engine, prompt(4))):
        with pytest.raises(EngineStopped):
            ask()
    assert time.monotonic() - began < 5


def test_a_profile_accounts_for_every_step_and_changes_nothing() -> None:
    tokens = prompt(70)
    with LLM.from_engine(tiny_engine(CONFIG)) as llm:
        plain = llm.generate(tokens, GREEDY).outputs[0].token_ids
    engine = tiny_engine(replace(CONFIG, profile=True))
    with LLM.from_engine(engine) as llm:
        assert llm.generate(tokens, GREEDY).outputs[0].token_ids == plain
    assert engine.profile is not None
    decode, prefill = engine.profile.kinds["decode"], engine.profile.kinds["prefill"]
    # 70 tokens in steps of 32; the token that the last of them chooses needs no step of its own.
    assert (prefill.steps, prefill.rows) == (3, 70)
    assert (decode.steps, decode.rows) == (7, 7)
    for times in (decode, prefill):
        assert sum(times.parts.values()) == pytest.approx(times.seconds)
        assert {"embedding", "attention and QKV", "MLP", "sampling", "scheduling and output"} <= set(times.parts)
        assert min(times.parts.values()) > 0
    assert "output head" in decode.parts
    text = "\n".join(engine.profile.lines())
    assert "decode: 7 steps, 7 tokens" in text
    assert "MLP" in text


def test_a_decode_step_makes_no_large_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of 30,000 tokens would be 120 KB; the context's pages 500 bytes."""
    taken: list[int] = []
    step = Engine._step

    def watched(self: Engine) -> None:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        step(self)
        taken.append(tracemalloc.get_traced_memory()[1] - before)

    monkeypatch.setattr(Engine, "_step", watched)
    engine = tiny_engine(CONFIG, spec=tiny_spec(vocab_size=30_000))
    try:
        llm = LLM.from_engine(engine)
        tracemalloc.start()
        llm.generate(prompt(900), replace(GREEDY, max_tokens=64))
        tracemalloc.stop()
    finally:
        engine.close()
    # Decode steps come last; the very last one ends the request. Publishing a page makes objects, not arrays.
    assert max(taken[-50:-1]) < 16_384, taken
