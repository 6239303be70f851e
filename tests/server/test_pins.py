"""Pins over HTTP: made, refused, let go, and each tenant's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from tests.support.tiny import tiny_engine

from .policies import ACME, OTHER, bearer, policy_server
from .running import RunningServer
from .scripted import ChatByteTokenizer

PROMPT = list(range(50))


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = tiny_engine(EngineConfig(page_size=16), n_frames=12)
    engine.tokenizer = ChatByteTokenizer()
    yield engine
    engine.close()


@pytest.fixture
def server(engine: Engine, tmp_path: Path) -> Iterator[RunningServer]:
    with policy_server(engine, tmp_path / "policy.toml") as running:
        yield running


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def pin(http: httpx.Client, key: str = ACME, **body: Any) -> httpx.Response:
    return http.post("/v1/cache/pins", json={"model": "tiny", "prompt": PROMPT, **body}, headers=bearer(key))


def hit(http: httpx.Client, prompt: list[int], key: str = ACME) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body, headers=bearer(key)).json()
    return int(answer["cache"]["hit_tokens"])


def press(http: httpx.Client) -> None:
    for seed in range(40):
        hit(http, [(seed * 7 + i) % 250 for i in range(200)], OTHER)


def test_a_pinned_prompt_stays(http: httpx.Client) -> None:
    made = pin(http, ttl="1m").json()
    assert (made["object"], made["tokens"], made["cache"]["computed_tokens"]) == ("cache.pin", 48, 50)
    assert pin(http, ttl=90).json()["id"] == made["id"]
    press(http)
    assert hit(http, [*PROMPT, 9]) == 48
    path = f"/v1/cache/pins/{made['id']}"
    assert http.delete(path, headers=bearer(OTHER)).status_code == 404
    assert http.delete(path, headers=bearer(ACME)).json()["deleted"] is True
    assert http.delete(path, headers=bearer(ACME)).status_code == 404
    press(http)
    assert hit(http, [*PROMPT, 9]) == 0, "a twin that is not pinned goes"


def test_another_tenants_pin_serves_nobody_else(http: httpx.Client) -> None:
    pin(http)
    assert hit(http, [*PROMPT, 9], OTHER) == 0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"ttl": "0s"}, "ttl must be from 1s to 86400s"),
        ({"ttl": "2d"}, "ttl must be from"),
        ({"ttl": 90000}, "ttl must be from"),
        ({"ttl": None}, "ttl"),
        ({"prompt": list(range(5))}, "nothing to pin"),
        ({"prompt": []}, "no tokens"),
        ({"prompt": 5}, "prompt"),
        ({"model": "none"}, "none"),
    ],
)
def test_what_cannot_be_pinned_says_why(http: httpx.Client, body: dict[str, Any], told: str) -> None:
    refused = pin(http, **body)
    assert refused.status_code in (400, 404)
    assert told in refused.json()["error"]["message"]


def test_pins_beyond_the_pool_are_refused_and_a_newcomer_is_admitted(http: httpx.Client) -> None:
    answers = [pin(http, prompt=[(31 * n + i * (n + 1)) % 250 for i in range(200)]) for n in range(60)]
    refused = [a for a in answers if a.status_code == 400]
    assert refused
    assert {a.json()["error"]["code"] for a in refused} == {"pin_limit_exceeded"}
    assert any(a.status_code == 200 for a in answers)
    body = {"model": "tiny", "prompt": [7] * 300, "max_tokens": 5}
    assert http.post("/v1/completions", json=body, headers=bearer(OTHER)).status_code == 200


def test_pins_give_way_to_a_request_that_is_alone_and_needs_their_pages(http: httpx.Client, engine: Engine) -> None:
    """What fits into the whole cache can be served whatever is pinned."""
    for n in range(60):
        pin(http, prompt=[(31 * n + i * (n + 1)) % 250 for i in range(200)])
    assert len(engine.call(lambda: engine._pins.of("acme"), timeout_s=10)) >= 2
    longest = engine.info.max_model_len
    body = {"model": "tiny", "prompt": [(i * i) % 250 for i in range(longest - 1)], "max_tokens": 1}
    assert http.post("/v1/completions", json=body, headers=bearer(OTHER)).status_code == 200


def test_marks_of_messages_are_pins(server: RunningServer, engine: Engine, http: httpx.Client) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key=ACME, max_retries=0)
    system: Any = [{"type": "text", "text": "s" * 100, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    ask: Any = {"model": "tiny", "max_tokens": 2, "system": system, "messages": [{"role": "user", "content": "hi"}]}
    client.messages.create(**ask)
    assert len(engine.call(lambda: engine._pins.of("acme"), timeout_s=10)) == 1
    press(http)
    answer = client.messages.create(**{**ask, "messages": [{"role": "user", "content": "other"}]})
    assert answer.usage.cache_read_input_tokens >= 96
    client.close()
