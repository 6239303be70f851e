"""Everything that is wrong with a request is told in one shape, with the field, its limit and the value."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from octavo.errors import CodecRangeError, OverloadedError

from .conftest import SETTINGS
from .running import RunningServer, running_server
from .scripted import Script, ScriptedEngine

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "scripted", "prompt": "hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with running_server(ScriptedEngine(), SETTINGS) as server, server.client() as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, object]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert body["error"]["message"]
    return body["error"]


def user(**fields: object) -> dict[str, object]:
    return {**CHAT, "messages": [{"role": "user", **fields}]}


def tool(**function: object) -> dict[str, object]:
    return {**CHAT, "tools": [{"type": "function", "function": function}]}


BAD_CHATS = [
    ({"model": "scripted"}, "messages", ["required"]),
    ({"messages": CHAT["messages"]}, "model", ["required"]),
    ({**CHAT, "messages": []}, "messages", ["at least 1"]),
    ({**CHAT, "messages": "hi"}, "messages", ["an array", "'hi'"]),
    ({**CHAT, "messages": ["hi"]}, "messages[0]", ["an object"]),
    ({**CHAT, "messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", ["'user'", "'robot'"]),
    ({**CHAT, "messages": [{"role": "user"}]}, "messages[0]", ["content is required"]),
    ({**CHAT, "messages": [{"role": "assistant", "content": "hi"}]}, "messages", ["assistant"]),
    (user(content=7), "messages[0].content", ["a string"]),
    (user(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content", ["'image_url'"]),
    (user(content=[{"type": "text"}]), "messages[0].content", ["text", "a string"]),
    (user(content=[7]), "messages[0].content", ["an object"]),
    (user(content="hi", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), "messages[0]", ["assistant"]),
    (user(content="hi", function_call={"name": "f"}), "messages[0]", ["function_call"]),
    ({**CHAT, "temperature": "1"}, "temperature", ["a number", "'1'"]),
    ({**CHAT, "temperature": True}, "temperature", ["a number"]),
    ({**CHAT, "temperature": 2.1}, "temperature", ["at most 2", "2.1"]),
    ({**CHAT, "temperature": -0.1}, "temperature", ["at least 0", "-0.1"]),
    ({**CHAT, "top_p": 0}, "top_p", ["greater than 0"]),
    ({**CHAT, "top_p": 1.5}, "top_p", ["at most 1", "1.5"]),
    ({**CHAT, "top_k": -2}, "top_k", ["at least -1", "-2"]),
    ({**CHAT, "min_p": 2}, "min_p", ["at most 1", "2"]),
    ({**CHAT, "repetition_penalty": 0}, "repetition_penalty", ["greater than 0"]),
    ({**CHAT, "presence_penalty": 2.5}, "presence_penalty", ["at most 2", "2.5"]),
    ({**CHAT, "frequency_penalty": -3}, "frequency_penalty", ["at least -2", "-3"]),
    ({**CHAT, "n": 0}, "n", ["at least 1", "0"]),
    ({**CHAT, "n": 1000000}, "n", ["at most 64", "1000000"]),
    ({**CHAT, "n": 1.0}, "n", ["an integer"]),
    ({**CHAT, "n": True}, "n", ["an integer", "a boolean"]),
    ({**CHAT, "max_tokens": 0}, "max_tokens", ["at least 1"]),
    ({**CHAT, "max_tokens": 10**30}, "max_tokens", ["at most"]),
    ({**CHAT, "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", ["5", "6"]),
    ({**CHAT, "seed": 2**63}, "seed", ["at most"]),
    ({**CHAT, "stream": "yes"}, "stream", ["a boolean", "'yes'"]),
    ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options", ["stream: true"]),
    ({**CHAT, "logprobs": 3}, "logprobs", ["a boolean"]),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", ["at most 20", "21"]),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs", ["logprobs: true"]),
    ({**CHAT, "stop": ["a"] * 17}, "stop", ["at most 16", "17"]),
    ({**CHAT, "stop": ""}, "stop", ["empty"]),
    ({**CHAT, "stop": [1]}, "stop", ["strings"]),
    ({**CHAT, "stop_token_ids": [260]}, "stop_token_ids", ["0 to 259", "260"]),
    ({**CHAT, "stop_token_ids": [True]}, "stop_token_ids[0]", ["an integer"]),
    ({**CHAT, "logit_bias": {"x": 1}}, "logit_bias", ["token ids", "'x'"]),
    ({**CHAT, "logit_bias": {"-1": 1}}, "logit_bias", ["token ids", "'-1'"]),
    ({**CHAT, "logit_bias": {"99999": 1}}, "logit_bias", ["0 to 259", "99999"]),
    ({**CHAT, "logit_bias": {"5": 101}}, "logit_bias", ["at most 100", "101"]),
    ({**CHAT, "logit_bias": [5]}, "logit_bias", ["an object"]),
    ({**CHAT, "cache_salt": 5}, "cache_salt", ["a string"]),
    ({**CHAT, "cache_salt": ""}, "cache_salt", ["at least 1"]),
    ({**CHAT, "cache_salt": "s" * 257}, "cache_salt", ["at most 256", "257"]),
    ({**CHAT, "prompt_cache_key": 5}, "prompt_cache_key", ["a string"]),
    ({**CHAT, "prompt_cache_key": ""}, "prompt_cache_key", ["at least 1"]),
    ({**CHAT, "prompt_cache_key": "k" * 257}, "prompt_cache_key", ["at most 256", "257"]),
    ({**CHAT, "tool_choice": "auto"}, "tool_choice", ["tools"]),
    (tool(), "tools[0].function.name", ["required"]),
    (tool(name="a b"), "tools[0].function.name", ["pattern"]),
    ({**CHAT, "tools": [{"type": "web_search"}]}, "tools[0].type", ["'function'", "'web_search'"]),
]

BAD_TEXTS = [
    ({"model": "scripted"}, "prompt", ["required"]),
    ({**TEXT, "prompt": ""}, "prompt", ["no tokens"]),
    ({**TEXT, "prompt": []}, "prompt", ["not empty"]),
    ({**TEXT, "prompt": [[]]}, "prompt", ["not empty"]),
    ({**TEXT, "prompt": {"a": 1}}, "prompt", ["a string"]),
    ({**TEXT, "prompt": [1.5]}, "prompt", ["token ids"]),
    ({**TEXT, "prompt": [True]}, "prompt", ["token ids"]),
    ({**TEXT, "prompt": ["a", [1]] * 200}, "prompt", ["at most 256", "400"]),
    ({**TEXT, "prompt": [1, 260]}, "prompt", ["0 to 259", "260", "position 1"]),
    ({**TEXT, "prompt": [-1]}, "prompt", ["0 to 259", "-1"]),
    ({**TEXT, "prompt": [10**40]}, "prompt", ["0 to 259"]),
    ({**TEXT, "prompt": [[1], [260]]}, "prompt[1]", ["0 to 259", "260"]),
    ({**TEXT, "max_tokens": -1}, "max_tokens", ["at least 0", "-1"]),
    ({**TEXT, "logprobs": True}, "logprobs", ["an integer", "a boolean"]),
    ({**TEXT, "logprobs": 21}, "logprobs", ["at most 20", "21"]),
    ({**TEXT, "best_of": 3}, "best_of", ["3", "n 1"]),
    ({**TEXT, "suffix": "the end"}, "suffix", ["not supported"]),
    ({**TEXT, "echo": 1}, "echo", ["a boolean"]),
]

REFUSED_IN_CHAT = {
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto", {"name": "f"}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 5, True],
    "audio": [{"voice": "alloy"}],
    "modalities": [["text", "audio"]],
    "web_search_options": [{}],
    "reasoning_effort": ["high"],
    "chat_template": ["{{ messages }}"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "continue_final_message": [True],
    "guided_json": [{}],
    "guided_choice": [["a", "b"]],
    "structured_outputs": [{"json": {}}],
    "logits_processors": [["x"]],
    "use_beam_search": [True],
    "min_tokens": [3],
    "bad_words": [["x"]],
    "allowed_token_ids": [[1]],
    "skip_special_tokens": [False],
    "truncate_prompt_tokens": [10],
    "echo": [True],
    "best_of": [2],
    "prompt_cache_retention": ["24h", "1h", 5],
}

HARMLESS = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k",
    "prompt_cache_retention": "in_memory",
    "safety_identifier": "s", "parallel_tool_calls": True, "response_format": {"type": "text"}, "tools": [],
    "tool_choice": None, "modalities": ["text"], "reasoning_effort": None, "min_tokens": 0, "best_of": 1,
    "logit_bias": {}, "stop": None, "seed": None, "top_k": -1, "unheard_of": {"x": [1, None]},
    "prediction": {"type": "content", "content": "x"},
}  # fmt: skip


@pytest.mark.parametrize(("body", "param", "fragments"), BAD_CHATS)
def test_bad_chat(http: httpx.Client, body: dict[str, object], param: str, fragments: list[str]) -> None:
    error = error_of(http.post(CHAT_PATH, json=body), 400)
    assert error["param"] == param
    assert all(fragment in error["message"] for fragment in fragments), error


@pytest.mark.parametrize(("body", "param", "fragments"), BAD_TEXTS)
def test_bad_completion(http: httpx.Client, body: dict[str, object], param: str, fragments: list[str]) -> None:
    error = error_of(http.post(TEXT_PATH, json=body), 400)
    assert error["param"] == param
    assert all(fragment in error["message"] for fragment in fragments), error


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in REFUSED_IN_CHAT.items() for v in values])
def test_unsupported_fields_are_refused(http: httpx.Client, name: str, value: object) -> None:
    error = error_of(http.post(CHAT_PATH, json={**CHAT, name: value}), 400)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_strict_tools_are_refused(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT_PATH, json=tool(name="f", strict=True)), 400)
    assert error["param"] == "tools[0].function.strict"


def test_harmless_fields_are_accepted(http: httpx.Client) -> None:
    for name, value in HARMLESS.items():
        assert http.post(CHAT_PATH, json={**CHAT, name: value}).status_code == 200, name
    assert http.post(CHAT_PATH, json={**CHAT, **HARMLESS}).status_code == 200


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{'a': 1}", "invalid_json"),
        (b'{"model": "scripted"} x', "invalid_json"),
        (b'{"temperature": NaN}', "invalid_json"),
        (b'{"temperature": -Infinity}', "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model": "\xff"}', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b"9" * 10_000, "invalid_json"),
        (b"[]", "invalid_type"),
        (b'"x"', "invalid_type"),
        (b"null", "invalid_type"),
    ],
)
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH, "/tokenize", "/detokenize"])
def test_malformed_json(http: httpx.Client, path: str, content: bytes, code: str) -> None:
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert error_of(response, 400)["code"] == code


def test_infinite_numbers(http: httpx.Client) -> None:
    body = json.dumps(CHAT)[:-1] + ', "temperature": 1e999}'
    response = http.post(CHAT_PATH, content=body, headers={"content-type": "application/json"})
    assert "finite" in error_of(response, 400)["message"]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_unknown_model(http: httpx.Client, path: str) -> None:
    error = error_of(http.post(path, json={**CHAT, **TEXT, "model": "gpt-7"}), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "gpt-7" in error["message"]
    assert "scripted" in error["message"]


def test_unknown_route_and_method(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing?secret=1"), 404)["code"] == "not_found"
    assert error_of(http.post("/v2/chat/completions", json=CHAT), 404)["code"] == "not_found"
    assert error_of(http.get("/assets/../app.py"), 404)["code"] == "not_found"
    response = http.get(CHAT_PATH)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert error_of(http.delete("/v1/models"), 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_wrong_content_type(http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = http.post(CHAT_PATH, content=json.dumps(CHAT), headers=headers)
    assert error_of(response, 415)["code"] == "unsupported_media_type"


def test_content_type_with_charset_and_encoded_bodies(http: httpx.Client) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert http.post(CHAT_PATH, content=json.dumps(CHAT), headers=headers).status_code == 200
    response = http.post(CHAT_PATH, content=b"x", headers={**headers, "content-encoding": "gzip"})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


def test_context_length_names_both_numbers(http: httpx.Client) -> None:
    for prompt_tokens, max_tokens in ((511, 2), (512, 1), (600, 1)):
        body = {**TEXT, "prompt": [1] * prompt_tokens, "max_tokens": max_tokens}
        error = error_of(http.post(TEXT_PATH, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert str(prompt_tokens + max_tokens) in error["message"]
    assert http.post(TEXT_PATH, json={**TEXT, "prompt": [1] * 511, "max_tokens": 1}).status_code == 200
    # Streams answer with the status, not with an event.
    error_of(http.post(TEXT_PATH, json={**TEXT, "prompt": [1] * 600, "stream": True}), 400)


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(scripted: ScriptedEngine, chunked: bool) -> None:
    from dataclasses import replace

    with running_server(scripted, replace(SETTINGS, max_body_bytes=4096)) as server, server.client() as client:
        body = json.dumps({**TEXT, "prompt": "x" * 10_000}).encode()
        headers = {"content-type": "application/json"}
        sent = iter([body[:5000], body[5000:]]) if chunked else body
        error = error_of(client.post(TEXT_PATH, content=sent, headers=headers), 413)
        assert error["code"] == "request_too_large"
        assert "4096" in error["message"]
        assert client.post(TEXT_PATH, json=TEXT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_overload(server: RunningServer, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.script = Script(refuse=OverloadedError("the queue is full: 8 wait, the limit is 8", retry_after_s=7))
    with server.client() as client:
        response = client.post(CHAT_PATH, json={**CHAT, "stream": stream})
    assert error_of(response, 503)["code"] == "overloaded"
    assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("a secret prompt"), CodecRangeError("a value beyond f16")])
def test_failure_before_the_first_token(
    server: RunningServer, scripted: ScriptedEngine, error: Exception, stream: bool
) -> None:
    scripted.script = Script(refuse=error)
    with server.client() as client:
        told = error_of(client.post(CHAT_PATH, json={**CHAT, "stream": stream}), 500)
    assert told["code"] == "internal_error"
    assert "secret" not in told["message"]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_failure_in_mid_stream(server: RunningServer, scripted: ScriptedEngine, path: str) -> None:
    scripted.script = Script(fail_after=3)
    with server.client() as client:
        assert error_of(client.post(path, json={**CHAT, **TEXT}), 500)["code"] == "internal_error"
        response = client.post(path, json={**CHAT, **TEXT, "stream": True})
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "secret" not in response.text
    assert all("choices" in json.loads(event) for event in events[:-1])
    assert len(events) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_by_the_server(server: RunningServer, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.script = Script(cancel_after=3)
    with server.client() as client:
        response = client.post(CHAT_PATH, json={**CHAT, "stream": stream})
    assert response.status_code == (200 if stream else 503)
    assert "request_cancelled" in response.text
    assert '"finish_reason":"cancelled"' not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_dead_engine_ends_requests(server: RunningServer, scripted: ScriptedEngine, stream: bool) -> None:
    import threading

    gate = threading.Semaphore(3)
    scripted.script = Script(gate=gate)
    with server.client() as client:
        threading.Timer(0.3, scripted.die).start()
        response = client.post(CHAT_PATH, json={**CHAT, "stream": stream})
        assert response.status_code == (200 if stream else 503)
        assert "engine_dead" in response.text
        assert error_of(client.post(CHAT_PATH, json=CHAT), 503)["code"] == "engine_dead"
        assert error_of(client.get("/health"), 503)["code"] == "engine_dead"


def test_health(server: RunningServer) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.head("/health").status_code == 200
