"""The anthropic SDK's own calls against a running server: shapes, order of streams, tools, errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from octavo.api.auth import ApiKeys
from octavo.api.errors import ApiError
from octavo.errors import OverloadedError

from .conftest import SETTINGS, anthropic_client
from .running import RunningServer, running_server
from .scripted import Script, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0}
WEATHER = {
    "name": "weather",
    "description": "The weather somewhere",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def prompt_of(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist(), skip_special=False)


def events_of(server: RunningServer, **body: object) -> list[tuple[str, dict[str, Any]]]:
    """The raw events of a stream: name, data."""
    with server.client() as client:
        text = client.post("/v1/messages", json={"max_tokens": 50, "stream": True, **body}).text
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def test_shape(any_claude: Anthropic) -> None:
    answer = any_claude.messages.create(model="model", max_tokens=8, messages=HI, system="Be brief.", extra_body=GREEDY)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "model")
    assert all(block.type == "text" and block.text for block in answer.content)
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.stop_sequence is None
    assert 1 <= answer.usage.output_tokens <= 8
    assert answer._request_id.startswith("req_")


def test_stream_equals_whole(any_claude: Anthropic) -> None:
    options: dict[str, Any] = {"model": "model", "max_tokens": 12, "messages": HI, "extra_body": GREEDY}
    whole = any_claude.messages.create(**options)
    with any_claude.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content)
    assert [b.text for b in final.content] == [b.text for b in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_event_order(server: RunningServer) -> None:
    events = events_of(server, model="scripted", messages=HI)
    names = [name for name, _ in events]
    n_deltas = len("Hello, wörld 👋!")
    assert names == [
        "message_start", "content_block_start", "ping", *["content_block_delta"] * n_deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert all(name == data["type"] for name, data in events)
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert events[1][1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [data for name, data in events if name == "content_block_delta"]
    assert {d["index"] for d in deltas} == {0}
    assert "".join(d["delta"]["text"] for d in deltas) == "Hello, wörld 👋!"
    last = events[-2][1]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"] == {**start["usage"], "output_tokens": 20}
    assert start["usage"]["output_tokens"] == 0


def test_event_order_with_tools(server: RunningServer, scripted: ScriptedEngine) -> None:
    scripted.script = Script(reply=f"Look.\n{CALL}\n{CALL}\nSo.")
    events = events_of(server, model="scripted", messages=HI, tools=[WEATHER], max_tokens=300)
    kinds = [
        (data["index"], name.removeprefix("content_block_"))
        for name, data in events
        if name.startswith("content_block_")
    ]
    assert list(dict.fromkeys(kinds)) == [(index, step) for index in range(4) for step in ("start", "delta", "stop")]
    assert [name for name, _ in events].count("ping") == 1
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert [s["type"] for s in starts] == ["text", "tool_use", "tool_use", "text"]
    assert all(s["input"] == {} and s["name"] == "weather" for s in starts[1:3])
    assert starts[1]["id"] != starts[2]["id"]
    pieces = [data["delta"] for name, data in events if name == "content_block_delta" and data["index"] == 1]
    assert [p["type"] for p in pieces] == ["input_json_delta"]
    assert json.loads(pieces[0]["partial_json"]) == {"city": "Zürich"}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(claude: Anthropic, stream: bool) -> None:
    def ask(**options: Any) -> Any:
        options = {"model": "scripted", "messages": HI, "max_tokens": 50, **options}
        if not stream:
            return claude.messages.create(**options)
        with claude.messages.stream(**options) as events:
            return events.get_final_message()

    ended, cut, stopped = ask(), ask(max_tokens=3), ask(stop_sequences=["zzz", "wörld"])
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("max_tokens", None, "Hel")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wörld")
    assert stopped.content[0].text == "Hello, "
    # Nothing is generated; the prompt is in the cache.
    none = ask(max_tokens=0)
    assert (none.stop_reason, none.content, none.usage.output_tokens) == ("max_tokens", [], 0)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_round_trip(claude: Anthropic, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.info = replace(scripted.info, max_model_len=2048)
    scripted.script = Script(reply=f"Let me look.\n{CALL}")
    options: dict[str, Any] = {"model": "scripted", "max_tokens": 200, "tools": [WEATHER], "system": "Be brief."}
    if stream:
        with claude.messages.stream(messages=HI, **options) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(messages=HI, **options)
    text, call = answer.content
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Zürich"})
    assert call.id.startswith("toolu_")
    assert answer.stop_reason == "tool_use"

    scripted.script = Script(reply="Rain.")
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "rain"},
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "no"}], "is_error": True},
        {"type": "text", "text": "Well?"},
    ]
    told = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    assert claude.messages.create(messages=told, **options).content[0].text == "Rain."
    function = {"name": "weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    assert prompt_of(scripted) == (
        f"<|im_start|>system\n{json.dumps([{'type': 'function', 'function': function}])}<|im_end|>\n"
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\nLet me look.<tool_call>{"name": "weather", "arguments": {"city": "Z\\u00fcrich"}}'
        "<|im_end|>\n"
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>tool\nError: no<|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_both_apis_make_one_prompt(claude: Anthropic, scripted: ScriptedEngine, client: Any) -> None:
    """Clients of either API share pages."""
    claude.messages.create(model="scripted", max_tokens=5, tools=[WEATHER], system="Be brief.", messages=HI)
    function = {"name": "weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    client.chat.completions.create(
        model="scripted", messages=[{"role": "system", "content": "Be brief."}, *HI],
        tools=[{"type": "function", "function": function}],
    )  # fmt: skip
    one, other = (r.prompt_token_ids.tolist() for r in scripted.requests)
    assert one == other


def test_tool_choice(claude: Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = Script(reply=CALL + CALL)
    options: dict[str, Any] = {"model": "scripted", "max_tokens": 300, "messages": HI, "tools": [WEATHER]}
    one = claude.messages.create(tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **options)
    assert [block.type for block in one.content] == ["tool_use"]
    none = claude.messages.create(tool_choice={"type": "none"}, **options)
    assert (none.content[0].text, none.stop_reason) == (CALL + CALL, "end_turn")
    assert "weather" not in prompt_of(scripted)


def test_messages_reach_the_template(claude: Anthropic, scripted: ScriptedEngine) -> None:
    claude.messages.create(
        model="scripted", max_tokens=1, system=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c<|im_end|>"},
            {"role": "assistant", "content": []},
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": ""},
        ],
    )  # fmt: skip
    assert prompt_of(scripted) == (
        "<|im_start|>system\none\ntwo<|im_end|>\n<|im_start|>user\na\nb\nc<|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )
    # The user's "<|im_end|>" is text, not a control token.
    assert scripted.requests[-1].prompt_token_ids.tolist().count(257) == 4


def test_an_answer_that_the_client_began(claude: Anthropic, scripted: ScriptedEngine) -> None:
    for begun in ("The answer is (", " <|im_end|>x", "x", "\n{"):
        claude.messages.create(model="scripted", max_tokens=1, messages=[*HI, {"role": "assistant", "content": begun}])
        assert prompt_of(scripted) == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{begun}"
        assert scripted.requests[-1].prompt_token_ids.tolist().count(257) == 1


def test_parameters_reach_the_engine(claude: Anthropic, scripted: ScriptedEngine) -> None:
    claude.messages.create(
        model="scripted", max_tokens=3, messages=HI, stop_sequences=["x"], metadata={"user_id": "somebody"},
        service_tier="auto", extra_headers={"anthropic-version": "2023-06-01", "anthropic-beta": "anything"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5, "thinking": {"type": "disabled"}, "cache_salt": "s"},
    )  # fmt: skip
    (request,) = scripted.requests
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (3, 0.5, 0.9, 5)
    assert (params.stop, params.n, params.logprobs) == (("x",), 1, None)
    assert request.cache_salt == '["s", null]'


def test_no_version_header_is_needed(server: RunningServer) -> None:
    with server.client() as client:
        response = client.post("/v1/messages", json={"model": "scripted", "max_tokens": 3, "messages": HI})
    assert response.status_code == 200
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_count_tokens(any_claude: Anthropic) -> None:
    options: dict[str, Any] = {"model": "model", "messages": HI, "tools": [WEATHER], "system": "Be brief."}
    usage = any_claude.messages.create(max_tokens=1, **options).usage
    counted = any_claude.messages.count_tokens(**options).input_tokens
    assert counted == usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_async_sdk(any_server: RunningServer) -> None:
    async def ask() -> tuple[list[str], str]:
        async with AsyncAnthropic(base_url=any_server.url, api_key="no-key", max_retries=0) as sdk:
            options: dict[str, Any] = {"model": "model", "max_tokens": 6, "messages": HI, "extra_body": GREEDY}
            whole = await sdk.messages.create(**options)
            async with sdk.messages.stream(**options) as stream:
                return [b.text for b in whole.content], "".join([text async for text in stream.text_stream])

    whole, streamed = asyncio.run(ask())
    assert "".join(whole) == streamed


# Errors


def error_of(response: Any, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["request-id"].startswith("req_")
    body = response.json()
    assert body == {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}
    return str(body["error"]["message"])


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def marked(text: str = "x", **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", **mark}}


USED = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
HOUR, MINUTES = marked(ttl="1h"), marked(ttl="5m")
MARKED_TOOL = {**WEATHER, "cache_control": {"type": "ephemeral"}}

BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_tokens": None}, ["max_tokens", "an integer"]),
    ({"max_tokens": -1}, ["max_tokens", "at least 0", "-1"]),
    ({"max_tokens": "9"}, ["max_tokens", "an integer", "'9'"]),
    ({"max_tokens": 600}, ["512", "621"]),
    ({"messages": []}, ["messages", "at least 1"]),
    ({"messages": "hi"}, ["messages", "an array"]),
    ({"messages": [{"role": "system", "content": "x"}]}, ["messages[0].role", "'user' or 'assistant'", "'system'"]),
    ({"messages": [{"role": "assistant", "content": "x"}]}, ["begin", "'user'"]),
    ({"messages": [{"role": "user"}]}, ["messages[0].content", "required"]),
    ({"messages": [{"role": "user", "content": 7}]}, ["messages[0].content", "string or an array"]),
    (user(), ["messages[0]", "at least one block"]),
    (user("x"), ["messages[0].content[0]", "an object"]),
    (user({"type": "text"}), ["messages[0].content[0].text", "required"]),
    (user({"type": "text", "text": None}), ["messages[0].content[0].text", "a string"]),
    (user({"type": "image", "source": {}}), ["messages[0].content[0]", "'image'", "not supported"]),
    (user({"type": "document", "source": {}}), ["'document'", "not supported"]),
    (user({"type": "web_search_tool_result"}), ["'web_search_tool_result'", "not supported"]),
    (user({"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}), ["content[0]", "'image'"]),
    (user(RESULT), ["messages[0].content[0].tool_use_id", "'t1'"]),
    (user(USED), ["tool_use", "'assistant'"]),
    ({"messages": [*HI, {"role": "assistant", "content": [RESULT]}]}, ["tool_result", "'user'"]),
    ({"messages": [*HI, {"role": "assistant", "content": [USED]}]}, ["tool_use", "tool_result must follow"]),
    ({"messages": [*HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, ["'thinking'"]),
    ({"messages": [*HI, {"role": "assistant", "content": [{**USED, "input": "{}"}]}]}, ["input", "an object"]),
    ({"system": [{"type": "image"}]}, ["system[0]", "'image'"]),
    ({"system": 5}, ["system", "string or an array"]),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking", "not supported"]),
    ({"output_config": {"effort": "high"}}, ["output_config", "effort"]),
    ({"mcp_servers": [{"url": "x"}]}, ["mcp_servers", "not supported"]),
    ({"container": "c"}, ["container", "not supported"]),
    ({"temperature": 1.5}, ["temperature", "at most 1", "1.5"]),
    ({"top_p": 0}, ["top_p", "greater than 0"]),
    ({"top_k": -1}, ["top_k", "at least 0", "-1"]),
    ({"stop_sequences": [""]}, ["stop_sequences[0]", "at least 1"]),
    ({"stop_sequences": "x"}, ["stop_sequences", "an array"]),
    ({"stop_sequences": ["x"] * 17}, ["stop_sequences", "at most 16", "17"]),
    ({"metadata": {"user_id": 5}}, ["metadata.user_id", "a string"]),
    ({"stream": "yes"}, ["stream", "a boolean"]),
    ({"tools": [{"name": "f"}]}, ["tools[0].input_schema", "required"]),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ["tools[0]", "'web_search_20250305'"]),
    ({"tools": [{**WEATHER, "strict": True}]}, ["tools[0]", "strict", "constrained decoding"]),
    ({"tools": [{**WEATHER, "name": "a b"}]}, ["tools[0].name"]),
    ({"tools": [WEATHER], "tool_choice": {"type": "any"}}, ["tool_choice", "'any'", "cannot be forced"]),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}, ["tool_choice", "'tool'"]),
    ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, ["tool_choice.type", "'some'"]),
    ({"tool_choice": {"type": "auto"}}, ["tool_choice", "tools"]),
    (user(marked(ttl="2h")), ["messages[0].content[0].cache_control.ttl", "'5m' or '1h'", "'2h'"]),
    (user(marked(ttl=300)), ["cache_control.ttl", "'5m' or '1h'", "300"]),
    (user({**HOUR, "cache_control": {"type": "forever"}}), ["cache_control.type", "'ephemeral'", "'forever'"]),
    (user({**HOUR, "cache_control": {}}), ["cache_control.type", "required"]),
    (user(marked("")), ["cache_control", "empty"]),
    (user(*[MINUTES] * 5), ["at most 4", "got 5"]),
    ({**user(*[MINUTES] * 4), "cache_control": {"type": "ephemeral"}}, ["at most 4", "got 5"]),
    (user(MINUTES, HOUR), ["messages[0].content[1]", "'1h'", "messages[0].content[0]", "'5m'"]),
    ({"system": [marked()], **user(HOUR)}, ["messages[0].content[0]", "system[0]"]),
    ({"system": [HOUR], "tools": [MARKED_TOOL]}, ["system[0]", "tools[0]", "tools, system, messages"]),
    ({**user(MINUTES), "cache_control": {"type": "ephemeral", "ttl": "1h"}}, ["cache_control", "'1h'"]),
]


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    with running_server(ScriptedEngine(), SETTINGS) as running:
        yield running


@pytest.mark.parametrize(("fields", "fragments"), BAD)
def test_bad_input(plain: RunningServer, fields: dict[str, Any], fragments: list[str]) -> None:
    body = {"model": "scripted", "max_tokens": 5, "messages": HI, **fields}
    with plain.client() as client:
        message = error_of(client.post("/v1/messages", json=body), 400, "invalid_request_error")
    assert all(fragment in message for fragment in fragments), message


def test_max_tokens_is_required(plain: RunningServer) -> None:
    with plain.client() as client:
        response = client.post("/v1/messages", json={"model": "scripted", "messages": HI})
    assert error_of(response, 400, "invalid_request_error") == "max_tokens is required"


def test_errors_before_the_route(plain: RunningServer, scripted: ScriptedEngine) -> None:
    body = {"model": "scripted", "max_tokens": 5, "messages": HI}
    with plain.client() as client:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            json_type = {"content-type": "application/json"}
            message = error_of(client.post(path, content=b"{", headers=json_type), 400, "invalid_request_error")
            assert "not valid JSON" in message
            error_of(client.post(path, content=b"[]", headers=json_type), 400, "invalid_request_error")
            error_of(client.post(path, content=b"{}"), 415, "invalid_request_error")
            response = client.get(path)
            error_of(response, 405, "invalid_request_error")
            assert response.headers["allow"] == "POST"
            error_of(client.post(path, json={**body, "model": "x"}), 404, "not_found_error")
        assert "batches" in error_of(client.post("/v1/messages/batches", json={}), 404, "not_found_error")
        error_of(client.post("/v1/messages", json=body, headers={"origin": "http://evil.example"}), 403,
                 "permission_error")  # fmt: skip
        # Beside these routes the shape stays OpenAI's.
        assert set(client.post("/v1/messagesx").json()["error"]) == {"message", "type", "param", "code"}
    with running_server(scripted, replace(SETTINGS, max_body_bytes=4096)) as server, server.client() as client:
        large = {**body, "messages": [{"role": "user", "content": "x" * 10_000}]}
        assert "4096" in error_of(client.post("/v1/messages", json=large), 413, "request_too_large")


def test_the_sdk_raises_the_right_class(claude: Anthropic, scripted: ScriptedEngine) -> None:
    options: dict[str, Any] = {"model": "scripted", "max_tokens": 5, "messages": HI}
    with pytest.raises(anthropic.BadRequestError, match=r"temperature must be at most 1.0, got 3"):
        claude.messages.create(**options, extra_body={"temperature": 3})
    with pytest.raises(anthropic.NotFoundError, match="scripted") as caught:
        claude.messages.create(**{**options, "model": "claude-9"})
    assert caught.value.request_id.startswith("req_")
    assert caught.value.body["error"]["type"] == "not_found_error"
    refusals: list[tuple[Exception, type[anthropic.APIStatusError], int, str]] = [
        (ApiError(429, "slow down", code="rate_limited", headers={"Retry-After": "3"}), anthropic.RateLimitError, 429,
         "rate_limit_error"),
        (OverloadedError("full", retry_after_s=7), anthropic.InternalServerError, 529, "overloaded_error"),
        (RuntimeError("a secret prompt"), anthropic.InternalServerError, 500, "api_error"),
    ]  # fmt: skip
    for refusal, kind, status, name in refusals:
        scripted.script = Script(refuse=refusal)
        with pytest.raises(kind) as refused:
            claude.messages.create(**options)
        assert refused.value.status_code == status
        assert refused.value.body["error"]["type"] == name
        assert "secret" not in str(refused.value)
        # Streams answer with the status too.
        with pytest.raises(kind), claude.messages.stream(**options):
            pass


def test_keys(scripted: ScriptedEngine) -> None:
    options: dict[str, Any] = {"model": "scripted", "max_tokens": 5, "messages": HI}
    with running_server(scripted, replace(SETTINGS, api_keys=ApiKeys(["the-key-123"]))) as server:
        with anthropic_client(server, "the-key-123") as sdk:
            assert sdk.messages.create(**options).content
        with anthropic_client(server, "wrong") as sdk:
            for call in (sdk.messages.create, sdk.messages.count_tokens):
                asked = options if call == sdk.messages.create else {"model": "scripted", "messages": HI}
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    call(**asked)
                assert caught.value.body["error"]["type"] == "authentication_error"
    assert len(scripted.requests) == 1


def test_failure_in_mid_stream(server: RunningServer, claude: Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = Script(fail_after=3)
    events = events_of(server, model="scripted", messages=HI)
    assert [name for name, _ in events][-1] == "error"
    assert events[-1][1]["error"]["type"] == "api_error"
    assert "secret" not in str(events)
    with claude.messages.stream(model="scripted", max_tokens=9, messages=HI) as stream:
        texts = stream.text_stream
        assert [next(texts) for _ in range(3)] == ["H", "e", "l"]
        with pytest.raises(anthropic.APIStatusError):
            next(texts)


def test_a_silent_stream_is_kept_alive(server: RunningServer, scripted: ScriptedEngine) -> None:
    """Pings once the message has started."""
    import threading

    gate = threading.Event()
    scripted.script = Script(reply="ok", prefill_gate=gate)
    body = {"model": "scripted", "max_tokens": 5, "messages": HI, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/messages", json=body) as response:
        lines = response.iter_lines()
        seen = [next(lines) for _ in range(4)]
        gate.set()
        assert seen[0] == "event: message_start"
        assert seen[3] == "event: ping"
        assert any(line == "event: message_stop" for line in lines)


def test_a_model_without_a_template(claude: Anthropic, scripted: ScriptedEngine) -> None:
    scripted.tokenizer.has_chat_template = False
    with pytest.raises(anthropic.BadRequestError, match="no chat template"):
        claude.messages.create(model="scripted", max_tokens=5, messages=HI)


def test_logs_hold_no_secrets(
    server: RunningServer, scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="octavo")
    secret = "xyzzy-the-secret-prompt"
    body = {"model": "scripted", "max_tokens": 50, "messages": [{"role": "user", "content": secret}], "system": secret}
    with server.client(headers={"x-api-key": secret}) as client:
        assert client.post("/v1/messages", json={**body, "metadata": {"user_id": secret}}).status_code == 200
        assert client.post("/v1/messages", json={**body, "temperature": secret}).status_code == 400
        scripted.script = Script(fail_after=2, error=RuntimeError(secret))
        assert secret not in client.post("/v1/messages", json={**body, "stream": True}).text
        assert secret not in client.post("/v1/messages", json=body).text
    assert secret not in caplog.text
    # The log is written, and would have shown it.
    assert "unexpected RuntimeError at" in caplog.text
