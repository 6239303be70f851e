"""The openai SDK's own calls against a running server: shapes, usage, order of streams."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI

from octavo.engine.client import EngineClient

from .running import RunningServer

LONG = "The cat sat on the mat and looked at the moon. " * 3
MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": LONG}]


def test_models(any_client: OpenAI) -> None:
    assert [m.id for m in any_client.models.list()] == ["model"]
    assert any_client.models.retrieve("model").object == "model"
    with pytest.raises(NotFoundError) as caught:
        any_client.models.retrieve("gpt-7")
    assert caught.value.code == "model_not_found"


def test_chat_shape(any_client: OpenAI) -> None:
    answer = any_client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=8, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert choice.logprobs is None
    assert choice.finish_reason in ("stop", "length")
    assert 1 <= answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_cached_tokens_cold_and_warm(any_client: OpenAI, any_engine: EngineClient, kind: str, stream: bool) -> None:
    page = any_engine.info.page_size
    text = f"{kind} {stream} " + LONG

    def usage() -> object:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        if kind == "chat":
            made = any_client.chat.completions.create(
                model="model", messages=[{"role": "user", "content": text}], max_tokens=4, temperature=0, **options
            )
        else:
            made = any_client.completions.create(model="model", prompt=text, max_tokens=4, temperature=0, **options)
        return list(made)[-1].usage if stream else made.usage

    cold, warm = usage(), usage()
    for one in (cold, warm):
        assert type(one.prompt_tokens_details.cached_tokens) is int
        assert one.prompt_tokens == cold.prompt_tokens
    # The tiny engine lives through all tests, and all chats begin alike, so a cold prompt may hit that much.
    assert cold.prompt_tokens_details.cached_tokens <= page
    expected = (cold.prompt_tokens - 1) // page * page
    assert expected <= warm.prompt_tokens_details.cached_tokens <= cold.prompt_tokens - 1


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_stream_order(any_client: OpenAI, include_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    whole = any_client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=6, temperature=0)
    chunks = list(
        any_client.chat.completions.create(
            model="model", messages=MESSAGES, max_tokens=6, temperature=0, stream=True, **options
        )
    )
    if include_usage:
        *chunks, last = chunks
        assert last.choices == []
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens
        assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert [c.choices[0].finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices[0].delta.content is None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_completion_stream_equals_whole(any_client: OpenAI) -> None:
    options = {"model": "model", "prompt": [LONG, "Another prompt."], "max_tokens": 6, "temperature": 0, "n": 2}
    whole = any_client.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts, reasons = [""] * 4, [None] * 4
    for chunk in any_client.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        assert reasons[choice.index] is None, "nothing follows a finish_reason"
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


async def _async_round(url: str) -> tuple[str, str]:
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as sdk:
        options = {"model": "model", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
        whole = await sdk.chat.completions.create(**options)
        text = ""
        async for chunk in await sdk.chat.completions.create(**options, stream=True):
            text += chunk.choices[0].delta.content or ""
        return whole.choices[0].message.content, text


def test_async_sdk(any_server: RunningServer) -> None:
    import asyncio

    whole, streamed = asyncio.run(_async_round(any_server.url))
    assert whole == streamed


def test_many_at_once(any_server: RunningServer) -> None:
    """Forty clients, streaming and not, with prompts of their own: each gets its own answer, and nothing is left."""
    import asyncio

    async def ask(sdk: AsyncOpenAI, number: int) -> tuple[str, str]:
        options = {
            "model": "model",
            "prompt": f"{number} is a number. ",
            "max_tokens": 6,
            "temperature": 0,
            "echo": True,
        }
        whole = await sdk.completions.create(**options)
        text = ""
        async for chunk in await sdk.completions.create(**options, stream=True):
            text += chunk.choices[0].text
        return whole.choices[0].text, text

    async def all_of_them() -> list[tuple[str, str]]:
        async with AsyncOpenAI(base_url=any_server.url + "/v1", api_key="none", max_retries=0, timeout=60) as sdk:
            return await asyncio.gather(*(ask(sdk, number) for number in range(40)))

    for number, (whole, streamed) in enumerate(asyncio.run(all_of_them())):
        assert whole.startswith(f"{number} is a number. ")
        assert whole == streamed
    assert len(any_server.server._generations) == 0
