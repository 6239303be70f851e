"""Thousands of malformed requests: each is answered in shape, with a 4xx or a right answer, and the server lives."""

from __future__ import annotations

import json
import random
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from .running import RunningServer
from .scripted import Script, ScriptedEngine

#: For the paths of each API: seconds, and requests that must be done by then.
LIMITS = {"openai": (18.0, 1000), "anthropic": (9.0, 400)}
PATHS = {
    "openai": ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
    "anthropic": ("/v1/messages", "/v1/messages", "/v1/messages", "/v1/messages/count_tokens"),
}

GOOD_OPENAI: dict[str, Any] = {
    "model": "scripted", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "1"}], "prompt": ["hi", [1, 2]],
    "tokens": [1, 2], "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "n": 2, "max_tokens": 3,
    "max_completion_tokens": 3, "stop": ["a"], "stop_token_ids": [3], "logit_bias": {"3": 1}, "seed": 3,
    "stream": False, "echo": True, "cache_salt": "s", "ignore_eos": False, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "repetition_penalty": 1.1, "best_of": 2, "add_generation_prompt": True,
    "stream_options": None, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "auto", "return_token_strs": True, "add_special_tokens": True, "user": "u",
    "prompt_cache_key": "k", "prompt_cache_retention": "in_memory",
}  # fmt: skip

EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}

GOOD_ANTHROPIC: dict[str, Any] = {
    "model": "scripted", "messages": [{"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "text", "text": "yes", "cache_control": {"type": "ephemeral"}},
    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": [1, {"b": None}]}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "is_error": True,
    "content": [{"type": "text", "text": "x"}]},
    {"type": "text", "text": "and now?", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]}],
    "system": [{"type": "text", "text": "be brief", "cache_control": EPHEMERAL}],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": EPHEMERAL}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "max_tokens": 3, "temperature": 0.5,
    "top_p": 0.5, "top_k": 3, "stop_sequences": ["a"], "metadata": {"user_id": "u"}, "stream": False,
    "cache_salt": "s", "thinking": {"type": "disabled"}, "service_tier": "auto",
}  # fmt: skip
GOOD = {"openai": GOOD_OPENAI, "anthropic": GOOD_ANTHROPIC}
KEPT = {"openai": ("model", "messages", "prompt", "tokens"), "anthropic": ("model", "messages", "max_tokens")}

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**40, 0.0, -0.0, 1e308, 5e-324, "", "x", "\x00", "é👋\u202e",
    "x" * 3000, [], {}, [[]], [None], [[[[]]]], {"": None}, {"type": "text"}, "NaN", [1e999], 1e999, "<|im_end|>",
    {"role": "user"}, list(range(300)), {str(i): i for i in range(300)}, "tool", "none", "required", ["a"] * 70,
]  # fmt: skip


def mutated(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with something in it replaced, dropped or doubled."""
    if depth and rng.random() < 0.25:
        return rng.choice(ODD)
    if isinstance(value, dict) and value:
        changed = dict(value)
        key = rng.choice(list(changed))
        action = rng.random()
        if action < 0.15:
            del changed[key]
        elif action < 0.25:
            changed[rng.choice(["", "x", key.upper(), key + " "])] = changed.pop(key)
        else:
            changed[key] = mutated(rng, changed[key], depth + 1)
        return changed
    if isinstance(value, list) and value:
        changed_list = list(value)
        index = rng.randrange(len(changed_list))
        if rng.random() < 0.2:
            changed_list *= rng.choice([0, 2, 40])
        else:
            changed_list[index] = mutated(rng, changed_list[index], depth + 1)
        return changed_list
    return rng.choice(ODD)


def encoded(rng: random.Random, body: Any) -> bytes:
    """The body as JSON, at times damaged."""
    data = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.3 and data:
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(len(data))
            action = rng.random()
            if action < 0.4:
                data[position] = rng.randrange(256)
            elif action < 0.7:
                del data[position : position + rng.randint(1, 20)]
            else:
                data[position:position] = rng.choice([b"\\ud800", b"NaN", b"[[", b'"', b"\xff", b"0" * 400])
            if not data:
                break
    return bytes(data)


def assert_shape(api: str, told: dict[str, Any]) -> None:
    if api == "openai":
        assert set(told["error"]) == {"message", "type", "param", "code"}
    else:
        assert (set(told), told["type"], set(told["error"])) == ({"type", "error"}, "error", {"type", "message"})


@pytest.mark.parametrize("api", GOOD)
def test_malformed_bodies(server: RunningServer, scripted: ScriptedEngine, api: str) -> None:
    scripted.script = Script(reply="ok")
    rng = random.Random(20)
    outcomes: dict[int, int] = {}
    seconds, at_least = LIMITS[api]
    end = time.monotonic() + seconds
    count = 0
    with server.client() as client:
        while count < 6000 and time.monotonic() < end:
            body: Any = GOOD[api]
            for _ in range(rng.randint(0, 3)):
                body = mutated(rng, body)
            # Small requests are likelier to get past the first check.
            if isinstance(body, dict) and rng.random() < 0.6:
                body = {k: v for k, v in body.items() if k in KEPT[api] or rng.random() < 0.15}
            path = rng.choice(PATHS[api])
            headers = {
                "content-type": rng.choice(["application/json"] * 20 + ["text/plain", "application/json;x", "é"])
            }
            response = client.post(
                path, content=encoded(rng, body), headers={k: v.encode() for k, v in headers.items()}
            )
            outcomes[response.status_code] = outcomes.get(response.status_code, 0) + 1
            count += 1
            if response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"):
                continue
            told = response.json()
            if response.status_code != 200:
                assert 400 <= response.status_code < 500, (response.status_code, body, told)
                assert_shape(api, told)
                assert len(response.text) < 1000
        assert count >= at_least, f"only {count} requests in {seconds} s"
        assert outcomes[200] > count // 100, outcomes
        assert outcomes[400] > count // 3, outcomes
        good = client.post("/v1/completions", json={"model": "scripted", "prompt": "hi"})
        assert good.json()["choices"][0]["text"] == "ok"
    scripted.wait_until("idle")
    assert len(server.server._generations) == 0


RAW = [
    b"\x00\x01\x02\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n"
    b"Content-Type: application/json\r\n\r\n{}",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    b"GET /%00%ff%c0%af../ HTTP/1.1\r\nHost: \xff\xfe\r\nOrigin: \xff\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
]


@pytest.mark.parametrize("data", RAW, ids=range(len(RAW)))
def test_malformed_http(server: RunningServer, data: bytes) -> None:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass
    assert not answer or answer.split(b"\r\n")[0].split(b" ")[1][:1] in (b"2", b"4"), answer[:200]
    assert httpx.get(server.url + "/health").status_code == 200
