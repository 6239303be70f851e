"""A hit never changes an answer: the same tokens and the same log-probabilities, to the bit, on every path."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cache import integrity
from octavo.config import CachePolicy, EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.messages import Delta, Event, Failed, Finished, GenerateRequest, SamplingParams
from octavo.engine.prompt import prompt_array
from octavo.errors import CodecRangeError
from octavo.llm import LLM, RequestOutput
from octavo.models.spec import ModelWeights, Tensor
from tests.support.tiny import tiny_engine, tiny_spec, tiny_weights

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=3, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.3, top_p=0.95, seed=11, max_tokens=20, logprobs=3, ignore_eos=True)

BACKENDS = ["reference", "cpu"]
CODECS = ["f32", "f16", "int8", "int4"]


def config(backend: str, codec: str, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "backend": backend, "threads": 2, "page_size": PAGE, "max_num_seqs": 8, "step_tokens": 64,
        "policy": CachePolicy(key_codec=codec, value_codec=codec),
    }  # fmt: skip
    return EngineConfig(**{**values, **changes})


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def answer(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Everything that must be equal: tokens, their log-probabilities, the alternatives and theirs."""
    return [(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs]


def sound(engine: Engine) -> None:
    assert engine.call(lambda: integrity.check(engine._cache), timeout_s=10) == []


def cold(backend: str, codec: str, tokens: list[int], params: SamplingParams, **engine: Any) -> RequestOutput:
    with LLM.from_engine(tiny_engine(config(backend, codec), **engine)) as llm:
        return llm.generate(tokens, params)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_hit_equals_miss(backend: str, codec: str) -> None:
    """Prompts of kP - 1, kP, kP + 1 tokens, three times each; the whole-prompt hit re-runs what it must."""
    with LLM.from_engine(tiny_engine(config(backend, codec))) as llm:
        for k in (1, 2, 3):
            for length in (k * PAGE - 1, k * PAGE, k * PAGE + 1):
                tokens = prompt(length, seed=1000 + length)
                first = llm.generate(tokens, GREEDY)
                assert first.cached_tokens == 0
                for _ in range(2):
                    again = llm.generate(tokens, GREEDY)
                    assert again.cached_tokens == (length - 1) // PAGE * PAGE
                    assert answer(again) == answer(first)
        sound(llm.engine)  # type: ignore[arg-type]


def test_decoded_pages_serve_the_next_turn(backend: str, codec: str) -> None:
    """The answer becomes part of the next prompt, and its pages were written by decoding."""
    first_prompt = prompt(21)
    with LLM.from_engine(tiny_engine(config(backend, codec))) as llm:
        first = llm.generate(first_prompt, replace(GREEDY, max_tokens=40))
        second_prompt = first_prompt + first.outputs[0].token_ids + prompt(9, seed=5)
        second = llm.generate(second_prompt, GREEDY)
        assert second.cached_tokens >= (21 + 39) // PAGE * PAGE
    assert answer(second) == answer(cold(backend, codec, second_prompt, GREEDY))


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_chunks_and_batch_mates(backend: str, codec: str, params: SamplingParams) -> None:
    prompts = [prompt(n, seed=n) for n in (5, 16, 33, 70, 100)]
    alone = [answer(cold(backend, codec, p, params)) for p in prompts]
    for step_tokens in (1, 7, 16, 48, 512):
        with LLM.from_engine(tiny_engine(config(backend, codec, step_tokens=step_tokens))) as llm:
            together = llm.generate(prompts, params)
            assert [answer(o) for o in together] == alone, f"step_tokens={step_tokens}"


def test_threads(codec: str) -> None:
    tokens = prompt(150)
    answers = []
    for threads in (1, 2, 3):
        with LLM.from_engine(tiny_engine(config("cpu", codec, threads=threads))) as llm:
            answers.append(answer(llm.generate(tokens, GREEDY)))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("kind", ["mqa", "mha", "bias", "qk_norm"])
def test_kinds_of_attention(backend: str, kind: str) -> None:
    spec = {
        "mqa": tiny_spec(n_kv_heads=1),
        "mha": tiny_spec(n_kv_heads=4),
        "bias": tiny_spec(qkv_bias=True),
        "qk_norm": tiny_spec(qk_norm=True),
    }[kind]
    tokens = prompt(75)
    whole = cold(backend, "int4", tokens, GREEDY, spec=spec)
    with LLM.from_engine(tiny_engine(config(backend, "int4", step_tokens=5), spec=spec)) as llm:
        assert answer(llm.generate(tokens, GREEDY)) == answer(whole)
        hit = llm.generate(tokens, GREEDY)
        assert hit.cached_tokens == 64
        assert answer(hit) == answer(whole)


def test_preemption(backend: str) -> None:
    """Ten requests that each need more than half of the pool: all finish, equal to their solo runs."""
    prompts = [prompt(90, seed=s) for s in range(10)]
    params = replace(GREEDY, max_tokens=60)
    alone = [answer(cold(backend, "int8", p, params)) for p in prompts]
    engine = tiny_engine(config(backend, "int8"), n_frames=4)
    need = (90 + 59) // PAGE
    classes = engine._cache.classes
    pool = 3 * engine._cache.footprint.per_frame(classes.sealed(0, "int8"))
    with LLM.from_engine(engine) as llm:
        outputs = llm.generate(prompts, params)
        assert [answer(o) for o in outputs] == alone
        if need * 10 > pool:
            assert all(o.preemptions <= 2 for o in outputs)
        assert all(o.cached_tokens == 0 for o in outputs), "a resumed request's own pages are no hits"
        sound(engine)


def test_no_prefix_cache(backend: str) -> None:
    tokens = prompt(60)
    policy = CachePolicy("int8", "int8", prefix_cache=False)
    with LLM.from_engine(tiny_engine(config(backend, "int8", policy=policy))) as llm:
        first, second = llm.generate(tokens, GREEDY), llm.generate(tokens, GREEDY)
        assert first.cached_tokens == second.cached_tokens == 0
        assert answer(first) == answer(second) == answer(cold(backend, "int8", tokens, GREEDY))
        assert llm.stats().pages_cached == 0


def test_namespaces_do_not_share_but_answer_the_same() -> None:
    tokens = prompt(60)
    with LLM.from_engine(tiny_engine(config("cpu", "int8"))) as llm:
        first = llm.generate(tokens, GREEDY, cache_salt="ab")
        other = llm.generate(tokens, GREEDY, cache_salt="a")
        again = llm.generate(tokens, GREEDY, cache_salt="ab")
        assert (first.cached_tokens, other.cached_tokens, again.cached_tokens) == (0, 0, 48)
        assert answer(first) == answer(other) == answer(again)


def test_forks_share_the_prompt_and_reproduce(backend: str) -> None:
    tokens = prompt(41)
    params = replace(SEEDED, n=4)
    engine = tiny_engine(config(backend, "int8"))
    with LLM.from_engine(engine) as llm:
        four = llm.generate(tokens, params)
        again = llm.generate(tokens, params)
        sound(engine)
    assert answer(four) == answer(again)
    texts = [tuple(c.token_ids) for c in four.outputs]
    assert len(set(texts)) == 4, "choices of one seed differ"
    assert answer(four)[0] == answer(cold(backend, "int8", tokens, SEEDED))[0]
    sealed, opened = engine._cache.classes.sealed(0, "int8").page_bytes, engine._cache.classes.opened(0).page_bytes
    shared, tail = 41 // PAGE, (41 + 19) // PAGE - 41 // PAGE
    assert four.kv_bytes == (shared + 4 * tail) * sealed + 4 * opened, "the prompt once and four tails"


def test_more_choices_than_run_at_once(backend: str) -> None:
    tokens = prompt(41)
    params = replace(SEEDED, n=5)
    with LLM.from_engine(tiny_engine(config(backend, "int8"))) as llm:
        together = answer(llm.generate(tokens, params))
    with LLM.from_engine(tiny_engine(config(backend, "int8", max_num_seqs=2))) as llm:
        assert answer(llm.generate(tokens, params)) == together


def test_prompt_logprobs_equal_generated_ones(backend: str, codec: str) -> None:
    """What decoding said of a token, prefill says too."""
    tokens = prompt(40)
    with LLM.from_engine(tiny_engine(config(backend, codec))) as llm:
        generated = llm.generate(tokens, replace(GREEDY, max_tokens=30))
        text = tokens + generated.outputs[0].token_ids
        scored = llm.generate(text, SamplingParams(max_tokens=0, prompt_logprobs=3))
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert scored.prompt_logprobs[40:] == generated.outputs[0].logprobs


def weights_that_f16_cannot_hold(token: int) -> ModelWeights:
    """Channel 0 of the hidden state is `token`'s alone, and the last layer makes values beyond f16 of it."""

    def values(tensor: Tensor) -> np.ndarray:
        return tensor.data.view(np.float32).reshape(tensor.rows, tensor.cols)

    weights = tiny_weights(tiny_spec())
    values(weights.embedding)[:, 0] = 0
    values(weights.embedding)[token] = 0
    values(weights.embedding)[token, 0] = 1e4
    for layer in weights.layers:
        values(layer.attention.o)[0] = 0
        values(layer.mlp.down)[0] = 0
    values(weights.layers[-1].attention.v)[:, 0] = 1e5
    return weights


def test_a_batch_mate_that_cannot_be_sealed_changes_nothing(backend: str) -> None:
    """The mate fails in the last layer of the step in which this prompt crosses a page edge from inside a page."""
    weights = weights_that_f16_cannot_hold(255)
    tokens = [t % 255 for t in prompt(220)]
    settings = config(backend, "f16", step_tokens=40)
    with LLM.from_engine(tiny_engine(settings, weights=weights)) as llm:
        alone = llm.generate(tokens, GREEDY)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine = tiny_engine(settings, weights=weights)
    with LLM.from_engine(engine):

        def submit() -> None:
            engine.submit(GenerateRequest("good", prompt_array(tokens), GREEDY), events.put)
            engine.submit(GenerateRequest("bad", prompt_array([1, 2, 255, *range(30)]), GREEDY), events.put)

        engine.call(submit, timeout_s=10)
        seen: list[Event] = []
        while sum(isinstance(e, Finished | Failed) for e in seen) < 2:
            seen.append(events.get(timeout=60))
        sound(engine)
    (failed,) = [e for e in seen if isinstance(e, Failed)]
    assert failed.request_id == "bad"
    assert isinstance(failed.error, CodecRangeError)
    deltas = [e for e in seen if isinstance(e, Delta)]
    assert [t for d in deltas for t in d.token_ids] == alone.outputs[0].token_ids
    assert [p for d in deltas for p in d.logprobs] == alone.outputs[0].logprobs


@pytest.fixture(scope="module")
def warm() -> Iterator[LLM]:
    with LLM.from_engine(tiny_engine(config("cpu", "int4", step_tokens=33), n_frames=12)) as llm:
        yield llm


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=4),
    mates=st.integers(0, 3),
)
def test_any_history(warm: LLM, parts: list[tuple[int, int]], mates: int) -> None:
    """Whatever one engine has served before, and beside, the answer equals a cold one."""
    tokens = [t for seed, length in parts for t in prompt(length, seed)]
    params = replace(GREEDY, max_tokens=6)
    outputs = warm.generate([tokens, *(tokens[: len(tokens) // 2 + i + 1] for i in range(mates))], params)
    assert answer(outputs[0]) == answer(cold("cpu", "int4", tokens, params))
    sound(warm.engine)  # type: ignore[arg-type]
