"""Receipts over HTTP: on each answer, whole or streamed, kept without text, and explained in words."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest

from octavo.explain import explain, likely_cause

from .running import RunningServer
from .test_cli import environment
from .test_scenarios import TEXT, client, engine, server, tokenizer  # noqa: F401

FIELDS = {
    "hit_tokens", "computed_tokens", "pruned_tokens", "exact", "hit_tiers", "miss", "pages", "bytes", "evictions",
    "preemptions", "expires_at", "pool", "policy", "cost",
}  # fmt: skip
MODEL = "smollm2"


def complete(client: openai.OpenAI, prompt: str | list[str], **more: Any) -> Any:  # noqa: F811
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0, **more)


def test_a_receipt_on_every_answer(client: openai.OpenAI) -> None:  # noqa: F811
    """Chat and completions, streamed and not: the same shape, and its numbers are the usage's."""
    messages: Any = [{"role": "user", "content": "An unusual opening. " + TEXT}]
    answers = [client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3) for _ in range(2)]
    streamed = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [complete(client, "Another opening. " + TEXT)]
    streamed_text = list(
        complete(client, "Another opening. " + TEXT, stream=True, stream_options={"include_usage": True})
    )
    for answer in (*answers, streamed[-1], *texts, streamed_text[-1]):
        receipt = answer.model_extra["cache"]
        assert set(receipt) == FIELDS
        assert receipt["hit_tokens"] == answer.usage.prompt_tokens_details.cached_tokens
        assert receipt["hit_tokens"] + receipt["computed_tokens"] == answer.usage.prompt_tokens
        assert receipt["bytes"]["by_codec"].keys() == {"int8", "open"}
        assert receipt["bytes"]["resident"] == sum(receipt["bytes"]["by_codec"].values())
    assert answers[0].model_extra["cache"]["hit_tokens"] == 0
    assert answers[1].model_extra["cache"]["miss"] is None
    assert all("cache" not in (chunk.model_extra or {}) for chunk in streamed[:-1])


def test_several_prompts_have_a_receipt_each(client: openai.OpenAI, server: RunningServer) -> None:  # noqa: F811
    answer = complete(client, ["First of two. " + TEXT, "Second."])
    receipts = answer.model_extra["cache"]
    assert [r["miss"]["reason"] for r in receipts] == ["cold", "too_short"]
    kept = httpx.get(f"{server.url}/v1/cache/receipts/{answer.id}").json()
    assert [r["hit_tokens"] for r in kept["receipts"]] == [r["hit_tokens"] for r in receipts]


def test_a_timestamp_at_the_front_is_named_and_not_kept(
    client: openai.OpenAI,  # noqa: F811
    server: RunningServer,  # noqa: F811
) -> None:
    complete(client, f"It is 2031-04-07 10:15:00 now. {TEXT}")
    answer = complete(client, f"It is 2031-04-07 10:16:30 now. {TEXT}")
    miss = answer.model_extra["cache"]["miss"]
    assert miss["reason"] == "diverged"
    assert "10:15" in miss["expected"]
    assert "10:16" in miss["got"]
    kept = httpx.get(f"{server.url}/v1/cache/receipts/{answer.id}")
    assert "10:1" not in kept.text, "kept receipts hold positions, not text"
    assert kept.json()["receipts"][0]["miss"] == {
        "reason": "diverged", "at_token": miss["at_token"], "likely_cause": "timestamp",
    }  # fmt: skip
    told = subprocess.run(
        [sys.executable, "-m", "octavo", "explain", answer.id, "--url", server.url],
        capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert f"At token {miss['at_token']}" in told.stdout
    assert "times and dates" in told.stdout


def test_an_unknown_receipt_is_404(server: RunningServer) -> None:  # noqa: F811
    answer = httpx.get(f"{server.url}/v1/cache/receipts/chatcmpl-none")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    told = subprocess.run(
        [sys.executable, "-m", "octavo", "explain", "chatcmpl-none", "--url", server.url],
        capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip
    assert told.returncode == 2
    assert "no receipt is kept" in told.stderr
    away = subprocess.run(
        [sys.executable, "-m", "octavo", "explain", "x", "--url", "http://127.0.0.1:9"],
        capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip
    assert away.returncode == 2
    assert "cannot ask" in away.stderr


def test_what_if(client: openai.OpenAI, server: RunningServer) -> None:  # noqa: F811
    complete(client, "What if. " + TEXT)
    told = httpx.get(f"{server.url}/v1/cache/what-if").json()
    assert told["curve"][0]["memory"] == 1.0
    rates = [point["hit_rate"] for point in told["curve"]]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(told["hit_tokens"] / told["query_tokens"])
    assert sum(told["hit_fraction_histogram"]["default"]["requests"]) > 0


@pytest.mark.parametrize(
    ("expected", "got", "cause"),
    [
        ("Today is 2026-12-07 10:15", "Today is 2026-12-08 09:00", "timestamp"),
        ("session 3f2a9c77-aa", "session 9be0112f-aa", "identifier"),
        ('{"name": "a", "age": 3}', '{"age": 3, "name": "a"}', "json_keys"),
        ("the cat sat", "the dog sat", None),
        ("version 2 of it", "version 3 of it", "timestamp"),
        ("", "x", None),
        (None, None, None),
    ],
)
def test_likely_cause(expected: str | None, got: str | None, cause: str | None) -> None:
    assert likely_cause(expected, got) == cause


def test_every_reason_has_words() -> None:
    receipt: dict[str, Any] = {
        "hit_tokens": 32, "computed_tokens": 10, "exact": True, "evictions": [], "preemptions": 1,
        "bytes": {"peak": 1 << 20, "by_codec": {"int8": 1 << 20}},
    }  # fmt: skip
    said = set()
    for reason in (
        "cold", "diverged", "too_short", "expired", "evicted", "erased", "other_policy", "other_build", "disabled",
    ):  # fmt: skip
        lines = list(explain({**receipt, "miss": {"reason": reason, "at_token": 32, "likely_cause": None}}))
        said.add(lines[1])
        assert "preempted" in json.dumps(lines)
    assert len(said) == 9
    assert "76%" in next(explain({**receipt, "miss": None}))
    assert "never started" in next(explain({**receipt, "hit_tokens": 0, "computed_tokens": 0, "miss": None}))
