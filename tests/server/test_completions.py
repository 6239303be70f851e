"""What /v1/completions adds: prompts of four kinds, echo, log-probabilities, offsets."""

from __future__ import annotations

import httpx
import pytest
from openai import OpenAI

from octavo.engine.client import EngineClient

from .running import RunningServer
from .scripted import Script, ScriptedEngine, fake_logprob

REPLY = "né 👋 ok"


@pytest.fixture
def reply(scripted: ScriptedEngine) -> str:
    scripted.script = Script(reply=REPLY)
    return REPLY


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [(72, 105)]),
        (["Hi", "yo"], [(72, 105), (121, 111)]),
        ([72, 105], [(72, 105)]),
        ([[72], [105, 33]], [(72,), (105, 33)]),
        (["Hi", [72]], [(72, 105), (72,)]),
        ("<|im_start|>a", [(256, 97)]),
    ],
)
def test_prompts(
    client: OpenAI, scripted: ScriptedEngine, reply: str, prompt: object, expected: list[tuple[int, ...]]
) -> None:
    answer = client.completions.create(model="scripted", prompt=prompt, max_tokens=100)
    assert [tuple(request.prompt_token_ids.tolist()) for request in scripted.requests] == expected
    assert [choice.text for choice in answer.choices] == [reply] * len(expected)
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_default_is_16_tokens(client: OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = Script(reply="x" * 100)
    answer = client.completions.create(model="scripted", prompt="Hi")
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16


def test_logprobs(client: OpenAI, reply: str) -> None:
    answer = client.completions.create(model="scripted", prompt="Hi", max_tokens=100, logprobs=2)
    told = answer.choices[0].logprobs
    data = reply.encode()
    split = [f"bytes:\\x{byte:02x}" for byte in "é👋".encode()]
    assert told.tokens == ["n", *split[:2], " ", *split[2:], " ", "o", "k", "<|im_end|>"]
    # Offsets count characters; bytes that continue a character have its offset.
    assert told.text_offset == [0, 1, 1, 2, 3, 3, 3, 3, 4, 5, 6, 7]
    assert told.token_logprobs == [fake_logprob(b, 0).logprob for b in (*data, 257)]
    for token, top in zip(told.tokens, told.top_logprobs, strict=True):
        assert token in top
        assert len(top) in (2, 3)
    zero = client.completions.create(model="scripted", prompt="Hi", max_tokens=100, logprobs=0).choices[0].logprobs
    assert zero.token_logprobs == told.token_logprobs
    assert zero.top_logprobs is None


@pytest.mark.parametrize("max_tokens", [0, 5, 100])
def test_echo(client: OpenAI, reply: str, max_tokens: int) -> None:
    prompt = "Grüße "
    answer = client.completions.create(model="scripted", prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1)
    (choice,) = answer.choices
    generated = reply.encode()[:max_tokens].decode(errors="ignore")
    assert choice.text == prompt + generated
    assert choice.finish_reason == ("stop" if max_tokens == 100 else "length")
    told = choice.logprobs
    n_prompt = len(prompt.encode())
    assert answer.usage.prompt_tokens == n_prompt
    assert len(told.tokens) == n_prompt + answer.usage.completion_tokens
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    assert None not in told.token_logprobs[1:]
    assert told.text_offset[:3] == [0, 1, 2]
    assert told.text_offset[n_prompt:][:1] == ([len(prompt)] if max_tokens else [])


def test_echo_without_logprobs(client: OpenAI, scripted: ScriptedEngine, reply: str) -> None:
    answer = client.completions.create(model="scripted", prompt=["Hi ", "Yo "], max_tokens=100, echo=True, n=2)
    assert [c.text for c in answer.choices] == ["Hi " + reply] * 2 + ["Yo " + reply] * 2
    assert all(c.logprobs is None for c in answer.choices)
    assert all(r.params.prompt_logprobs is None for r in scripted.requests)
    # An echo is the whole prompt, control tokens too.
    answer = client.completions.create(model="scripted", prompt=[256, 72], max_tokens=0, echo=True)
    assert answer.choices[0].text == "<|im_start|>H"


@pytest.mark.parametrize("options", [{}, {"logprobs": 3}, {"echo": True}, {"echo": True, "logprobs": 3, "n": 2}])
def test_stream_equals_whole(any_client: OpenAI, options: dict[str, object]) -> None:
    asked = {"model": "model", "prompt": "Grüße, Welt. ", "max_tokens": 7, "temperature": 0, **options}
    whole = any_client.completions.create(**asked)
    n = len(whole.choices)
    texts = [""] * n
    logprobs: list[dict[str, list[object]]] = [{} for _ in range(n)]
    for chunk in any_client.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            for name, values in choice.logprobs.model_dump().items():
                if values is not None:
                    logprobs[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole.choices]
    for choice, streamed in zip(whole.choices, logprobs, strict=True):
        assert streamed == ({} if choice.logprobs is None else choice.logprobs.model_dump(exclude_none=True))


def test_echoed_logprobs_agree_with_generated(any_client: OpenAI, any_engine: EngineClient) -> None:
    """What a model gave as its tokens' log-probabilities it gives again when they come as a prompt."""
    prompt = any_engine.tokenizer.encode("The sea is", add_special=False)
    first = any_client.completions.create(
        model="model", prompt=prompt, max_tokens=6, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
    )
    told = first.choices[0].logprobs
    ids = [_token_id(any_engine, label) for label in told.tokens]
    again = any_client.completions.create(
        model="model", prompt=[*prompt, *ids], max_tokens=0, temperature=0, logprobs=1, echo=True
    )
    assert again.choices[0].logprobs.tokens[len(prompt) :] == told.tokens
    assert again.choices[0].logprobs.token_logprobs[len(prompt) :] == told.token_logprobs


def _token_id(engine: EngineClient, label: str) -> int:
    if label.startswith("bytes:"):  # only the byte tokenizer is met with such labels here
        return int(label[8:], 16)
    (token_id,) = engine.tokenizer.encode(label, add_special=False, parse_special=True)
    return token_id


@pytest.mark.parametrize("stop", ["wörld", [" ", "x"], ["ö", "H"]])
def test_stop_strings(client: OpenAI, scripted: ScriptedEngine, stop: object) -> None:
    answer = client.completions.create(model="scripted", prompt="Hi", max_tokens=100, stop=stop)
    expected = {"wörld": "Hello, ", " ": "Hello,", "ö": ""}[stop if isinstance(stop, str) else stop[0]]
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "stop"
    assert scripted.requests[0].params.stop == ((stop,) if isinstance(stop, str) else tuple(stop))


def test_parameters_reach_the_engine(client: OpenAI, scripted: ScriptedEngine) -> None:
    client.completions.create(
        model="scripted", prompt="Hi", max_tokens=3, temperature=0.5, top_p=0.9, seed=7, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={"65": -5}, n=2, stop=["x"], best_of=2,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [9], "ignore_eos": True,
                    "cache_salt": "salt"},
    )  # fmt: skip
    (request,) = scripted.requests
    params = request.params
    assert request.cache_salt == '["salt", null]'
    assert (params.max_tokens, params.temperature, params.top_p, params.seed, params.n) == (3, 0.5, 0.9, 7, 2)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (0.5, -0.5, {65: -5.0})
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.2)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x",), (9,), True)


def test_salt_divides(any_client: OpenAI, any_engine: EngineClient) -> None:
    text = "This prefix is long enough for some pages to be shared, or not to be. " * 2

    def cached(salt: str | None) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        answer = any_client.completions.create(model="model", prompt=text, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("ab") == 0
    assert cached("ab") > 0
    assert cached("a") == 0
    assert cached(None) == 0
    assert cached(None) > 0


def test_submitting_is_all_or_nothing(server: RunningServer, scripted: ScriptedEngine) -> None:
    """A list of prompts of which one is refused leaves nothing running."""
    with server.client() as client:
        body = {"model": "scripted", "prompt": ["Hi", "x" * 600], "max_tokens": 5}
        response: httpx.Response = client.post("/v1/completions", json=body)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    scripted.wait_until("idle")
    assert scripted.cancelled == [scripted.requests[0].request_id]
