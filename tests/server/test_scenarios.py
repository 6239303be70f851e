"""Faults that users of other engines met, as scenarios against the running server with a real model.

The model is SmolLM2-135M with an int8 cache. "Equal" is the same tokens and the same log-probabilities, to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.config import CachePolicy, EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.text.tokenizer import Tokenizer

from .conftest import SETTINGS, openai_client
from .running import RunningServer, running_server

PAGE = 32
CONFIG = EngineConfig(
    threads=2, page_size=PAGE, kv_memory_bytes=96 << 20, max_num_seqs=8, step_tokens=128, max_model_len=2048,
    policy=CachePolicy("int8", "int8"),
)  # fmt: skip
TEXT = (
    "The harbour lay still under a pale sky, and the boats that had come in before dawn rocked against the stones "
    "as if they had never left them. Nobody spoke of the storm. A woman counted baskets, a boy counted gulls, and "
    "the old pilot, who had counted both for sixty years, looked at the water and said it would rain by noon. "
)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    engine = build_engine(str(smollm2), CONFIG, "smollm2")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[RunningServer]:
    with running_server(engine, replace(SETTINGS, drain_s=5)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as sdk:
        yield sdk.with_options(timeout=120)


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    return engine.tokenizer


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(TEXT * 12)


def unique(text: list[int], n: int, key: str, tokenizer: Tokenizer) -> list[int]:
    """n tokens that nobody else's test begins with."""
    return (tokenizer.encode(f"[{key}]") + text)[:n]


def complete(client: openai.OpenAI, prompt: Any, *, max_tokens: int = 8, **extra: Any) -> Any:
    salt = extra.pop("salt", "")
    return client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=3,
        extra_body={"ignore_eos": True, **({"cache_salt": salt} if salt else {}), **extra.pop("body", {})}, **extra,
    )  # fmt: skip


def answer(completion: Any) -> list[tuple[Any, ...]]:
    return [(c.text, c.logprobs.tokens, c.logprobs.token_logprobs, c.logprobs.top_logprobs) for c in completion.choices]


def cached(completion: Any) -> int:
    return int(completion.usage.prompt_tokens_details.cached_tokens)


def cold(client: openai.OpenAI, prompt: list[int], **extra: Any) -> Any:
    """The same request where nothing is cached for it: a salt of its own."""
    cold.n = getattr(cold, "n", 0) + 1  # type: ignore[attr-defined]
    result = complete(client, prompt, salt=f"cold-{cold.n}", **extra)  # type: ignore[attr-defined]
    assert cached(result) == 0
    return result


@pytest.mark.parametrize("k", [1, 2, 3])
def test_identical_repeat(client: openai.OpenAI, tokenizer: Tokenizer, text: list[int], k: int) -> None:
    for length in (k * PAGE - 1, k * PAGE, k * PAGE + 1):
        prompt = unique(text, length, f"repeat {length}", tokenizer)
        first, *others = [complete(client, prompt) for _ in range(3)]
        assert cached(first) == 0
        for other in others:
            assert (length - 1) // PAGE * PAGE <= cached(other) <= length - 1
            assert answer(other) == answer(first)


def test_tails_and_mixed_batches(client: openai.OpenAI, tokenizer: Tokenizer, text: list[int]) -> None:
    prefix = unique(text, 5 * PAGE, "tails", tokenizer)
    complete(client, prefix)
    for n in (1, 2, 3, PAGE - 1, PAGE, PAGE + 1):
        prompt = prefix + text[200 : 200 + n]
        warm = complete(client, prompt)
        assert cached(warm) >= 4 * PAGE
        assert answer(warm) == answer(cold(client, prompt))
    prompts = [
        prefix + text[300:317],
        unique(text, 150, "mixed one", tokenizer),
        unique(text, 70, "mixed two", tokenizer),
    ]
    solo = [answer(cold(client, p)) for p in prompts]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda p: complete(client, p), prompts))
    assert [answer(c) for c in together] == solo
    assert [cached(c) > 0 for c in together] == [True, False, False]


def test_edit_near_the_end(client: openai.OpenAI, tokenizer: Tokenizer, text: list[int]) -> None:
    prompt = unique(text, 5 * PAGE + 9, "edit", tokenizer)
    complete(client, prompt)
    edited = prompt[:-3] + text[50:53]
    again = complete(client, edited)
    assert cached(again) == 5 * PAGE
    assert answer(again) == answer(cold(client, edited))


def test_a_stream_stopped_in_mid_page(client: openai.OpenAI, tokenizer: Tokenizer, text: list[int]) -> None:
    prompt = unique(text, 2 * PAGE + 5, "stopped", tokenizer)
    n_seen = 0
    with client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True},
        logprobs=0,
    ) as stream:  # fmt: skip
        for chunk in stream:
            if chunk.choices and chunk.choices[0].logprobs:
                n_seen += len(chunk.choices[0].logprobs.tokens or [])
            if n_seen >= 11:
                break
    assert n_seen >= 11
    whole = cold(client, prompt, max_tokens=40)
    ids = tokenizer.encode(whole.choices[0].text)
    for continuation in (ids[:11], text[400:415]):
        longer = prompt + continuation
        warm = complete(client, longer)
        assert cached(warm) >= 2 * PAGE
        assert answer(warm) == answer(cold(client, longer))


def test_usage_and_stream_shape(server: RunningServer, client: openai.OpenAI) -> None:
    message = [{"role": "user", "content": f"Say hello. {TEXT}"}]
    bodies = {
        "chat/completions": {"messages": message, "max_tokens": 6},
        "completions": {"prompt": f"Once. {TEXT}", "max_tokens": 6},
    }
    for route, body in bodies.items():
        for warm in (False, True):
            response = httpx.post(f"{server.url}/v1/{route}", json={"model": "smollm2", **body}, timeout=60).json()
            usage = response["usage"]
            hits = usage["prompt_tokens_details"]["cached_tokens"]
            assert type(hits) is int
            assert 0 <= hits <= usage["prompt_tokens"]
            assert (hits > 0) == warm
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for include in (False, True):
            extra = {"stream": True, **({"stream_options": {"include_usage": True}} if include else {})}
            lines = [
                line.removeprefix("data: ")
                for line in httpx.post(
                    f"{server.url}/v1/{route}", json={"model": "smollm2", **body, **extra}, timeout=60
                ).text.split("\n\n")
                if line.startswith("data: ")
            ]
            assert lines[-1] == "[DONE]"
            chunks = [json.loads(line) for line in lines[:-1]]
            if include:
                last = chunks.pop()
                assert last["choices"] == []
                assert type(last["usage"]["prompt_tokens_details"]["cached_tokens"]) is int
            assert all(not c.get("usage") for c in chunks)
            reasons = [c["choices"][0]["finish_reason"] for c in chunks]
            assert reasons[-1] in ("length", "stop")
            assert set(reasons[:-1]) <= {None}


def test_five_turns(client: openai.OpenAI) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "You answer briefly.\n\n" + TEXT}]
    previous = 0
    says = [
        "Hello\n\n\nthere",
        "emoji 🧑‍🚀🏳️‍🌈 and 漢字",
        "<think>hm</think> go on",
        "  spaces   kept\t",
        "<|im_end|> bye",
    ]
    for turn, content in enumerate(says):
        messages.append({"role": "user", "content": content})
        ask: dict[str, Any] = {
            "model": "smollm2", "messages": messages, "max_tokens": 24, "temperature": 0, "logprobs": True,
            "top_logprobs": 2,
        }  # fmt: skip
        warm = client.chat.completions.create(**ask)
        again = client.chat.completions.create(**ask, extra_body={"cache_salt": f"five-{turn}"})
        assert again.usage.prompt_tokens_details.cached_tokens == 0
        hits = warm.usage.prompt_tokens_details.cached_tokens
        assert hits >= previous // PAGE * PAGE
        assert (warm.choices[0].message.content, warm.choices[0].logprobs) == (
            again.choices[0].message.content,
            again.choices[0].logprobs,
        )
        previous = warm.usage.prompt_tokens - 1
        messages.append({"role": "assistant", "content": warm.choices[0].message.content})


def test_oversize(client: openai.OpenAI, tokenizer: Tokenizer, text: list[int]) -> None:
    limit = 2048
    prompt = unique(text * 3, limit + 1, "oversize", tokenizer)
    assert len(prompt) == limit + 1
    for n_prompt, max_tokens in ((limit, 1), (limit + 1, 1), (limit - 5, 6), (100, limit)):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, prompt[:n_prompt], max_tokens=max_tokens)
        assert caught.value.code == "context_length_exceeded"
        assert str(limit) in str(caught.value)
        assert str(n_prompt) in str(caught.value)
    fits = complete(client, prompt[: limit - 1], max_tokens=1)
    assert fits.usage.prompt_tokens == limit - 1
    with ThreadPoolExecutor(2) as pool:
        queued = pool.submit(complete, client, prompt[:40])
        with pytest.raises(openai.BadRequestError):
            complete(client, prompt)
        assert queued.result().choices[0].finish_reason == "length"


def test_forks(client: openai.OpenAI, engine: Engine, tokenizer: Tokenizer, text: list[int]) -> None:
    prompt = unique(text, 3 * PAGE + 7, "forks", tokenizer)
    body = {"ignore_eos": True}

    def four(**extra: Any) -> Any:
        return client.completions.create(
            model="smollm2", prompt=prompt, n=4, max_tokens=12, logprobs=1,
            extra_body={**body, **extra.pop("body", {})}, **extra,
        )  # fmt: skip

    seeded, again = four(seed=7, temperature=1.0), four(seed=7, temperature=1.0)
    assert [c.index for c in seeded.choices] == [0, 1, 2, 3]
    assert answer(seeded) == answer(again)
    assert len({c.text for c in seeded.choices}) == 4
    greedy = four(temperature=0)
    assert len({c.text for c in greedy.choices}) == 1
    stop = seeded.choices[2].text[3:8]
    early = four(seed=7, temperature=1.0, stop=[stop])
    assert early.choices[2].finish_reason == "stop"
    assert stop not in early.choices[2].text
    others = [(c.text, s.text) for c, s in zip(early.choices, seeded.choices, strict=True) if stop not in s.text]
    assert all(a == b for a, b in others)

    parts: dict[int, str] = {}
    for chunk in client.completions.create(
        model="smollm2", prompt=prompt, n=4, max_tokens=12, seed=7, temperature=1.0, stream=True, extra_body=body
    ):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    assert [parts[i] for i in range(4)] == [c.text for c in seeded.choices]
    assert engine.call(lambda: len(engine._cache.tables), timeout_s=10) == 0


def test_streaming_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    """No character is split, at max_tokens either."""
    for n in (1, 2, 3, 5, 8, 13, 21):
        ask: dict[str, Any] = {
            "model": "smollm2", "max_tokens": n, "temperature": 0,
            "messages": [{"role": "user", "content": "Repeat: 🧑‍🚀 漢字 é 🏳️‍🌈"}],
        }  # fmt: skip
        whole = client.chat.completions.create(**ask).choices[0].message.content
        pieces = [
            c.choices[0].delta.content or "" for c in client.chat.completions.create(**ask, stream=True) if c.choices
        ]
        assert "".join(pieces) == whole
        assert "\ufffd" not in whole


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x", "n": 10_000}, "n"),
        ({"prompt": "x", "logprobs": 1000}, "logprobs"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "logit_bias": {"99999999": 1}}, "logit_bias"),
    ],
)
def test_bad_input(server: RunningServer, body: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"model": "smollm2", **body}, timeout=30)
    error = response.json()["error"]
    assert response.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
