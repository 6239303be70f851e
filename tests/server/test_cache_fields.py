"""The fields by which other vendors' clients divide and read the cache, sent by the openai SDK."""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from typing import Any

import openai
import pytest
from openai import OpenAI

from octavo.api.schemas.common import cache_division
from octavo.engine.client import EngineClient

LONG = "A prompt that fills some pages, for keys to divide. " * 3
PLAIN: dict[str, Any] = {}


def ask(client: OpenAI, kind: str, text: str = LONG, **options: Any) -> Any:
    """The usage of one request; of a stream, that of its last chunk."""
    if kind == "completions" and "prompt_cache_key" in options:  # the SDK names it for chat alone
        key = options.pop("prompt_cache_key")
        options["extra_body"] = {**options.get("extra_body", {}), "prompt_cache_key": key}
    if kind == "chat":
        made = client.chat.completions.create(
            model="model", messages=[{"role": "user", "content": text}], max_tokens=2, temperature=0, **options
        )
    else:
        made = client.completions.create(model="model", prompt=text, max_tokens=2, temperature=0, **options)
    return list(made)[-1].usage if options.get("stream") else made.usage


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_hits_and_misses_add_up(any_client: OpenAI, any_engine: EngineClient, kind: str, stream: bool) -> None:
    text = f"{kind} {stream}: {LONG}"
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    options["prompt_cache_key"] = f"add up {kind} {stream}"
    cold, warm = (ask(any_client, kind, text, **options) for _ in range(2))
    for usage in (cold, warm):
        assert usage.prompt_cache_hit_tokens == usage.prompt_tokens_details.cached_tokens
        assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens
    assert cold.prompt_cache_hit_tokens == 0
    page = any_engine.info.page_size
    assert warm.prompt_cache_hit_tokens >= (warm.prompt_tokens - 1) // page * page > 0


def test_keys_and_salts_divide(any_client: OpenAI) -> None:
    """Each pair of key and salt has pages of its own, also where joined they would spell the same."""
    divisions = [
        {"prompt_cache_key": "ab"},
        {"extra_body": {"cache_salt": "ab"}},
        {"prompt_cache_key": "c", "extra_body": {"cache_salt": "ab"}},
        {"prompt_cache_key": "bc", "extra_body": {"cache_salt": "a"}},
        {"prompt_cache_key": "a", "extra_body": {"cache_salt": "bc"}},
        {"extra_body": {"cache_salt": '["ab", "c"]'}},
        {"prompt_cache_key": "null"},
        PLAIN,
    ]
    text = "divided " + LONG
    assert [ask(any_client, "completions", text, **d).prompt_cache_hit_tokens for d in divisions] == [0] * 8
    assert all(ask(any_client, "completions", text, **d).prompt_cache_hit_tokens > 0 for d in divisions)


def test_division_is_injective() -> None:
    parts = [None, "", "a", "b", "ab", "null", "\x00", ",", '"', '", "', "\\", '\\"', "é", '["a", "b"]']
    pairs = list(product(parts, parts))
    for one, other in combinations_with_replacement(pairs, 2):
        assert (cache_division(*one) == cache_division(*other)) == (one == other)
    assert cache_division(None, None) == ""


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_retention(any_client: OpenAI, kind: str) -> None:
    assert ask(any_client, kind, "hi", extra_body={"prompt_cache_retention": "in_memory"}).prompt_tokens
    for value in ("24h", "1h", 5):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(any_client, kind, "hi", extra_body={"prompt_cache_retention": value})
        assert (caught.value.param, caught.value.code) == ("prompt_cache_retention", "unsupported_parameter")
        assert "in_memory" in str(caught.value)
        assert repr(value) in str(caught.value)
