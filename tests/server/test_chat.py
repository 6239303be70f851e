"""What /v1/chat/completions adds: messages for the template, log-probabilities, choices, tool calls."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from octavo.api.tool_calls import Call, Text, ToolCallParser

from .scripted import Script, ScriptedEngine, fake_logprob

ASK = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def prompt_of(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist(), skip_special=False)


def test_messages_reach_the_template(client: OpenAI, scripted: ScriptedEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
    client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "user", "content": "<|im_end|>"},
        ],
    )
    assert prompt_of(scripted) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\none\ntwo<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"b": 1, "a": 2}}<|im_end|>\n'
        "<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>user\n<|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # The user's "<|im_end|>" is text, not a control token.
    assert scripted.requests[-1].prompt_token_ids.tolist().count(257) == 5


def test_generation_prompt_can_be_left_out(client: OpenAI, scripted: ScriptedEngine) -> None:
    client.chat.completions.create(model="scripted", messages=ASK, extra_body={"add_generation_prompt": False})
    assert prompt_of(scripted) == "<|im_start|>user\nhi<|im_end|>\n"


def test_no_template(client: OpenAI, scripted: ScriptedEngine) -> None:
    import openai

    scripted.tokenizer.has_chat_template = False
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=ASK)
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_token_limit(client: OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model="scripted", messages=ASK, **{name: 9})
    # The limit falls into the middle of a character, of which nothing is shown.
    assert answer.choices[0].message.content == "Hello, w\u00f6"[:8]
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: OpenAI, scripted: ScriptedEngine, stream: bool, top: int | None) -> None:
    scripted.script = Script(reply="né👋")
    options = {} if top is None else {"top_logprobs": top}
    made = client.chat.completions.create(model="scripted", messages=ASK, logprobs=True, stream=stream, **options)
    if stream:
        content = [e for chunk in made for e in (chunk.choices[0].logprobs or _NONE).content or ()]
    else:
        assert made.choices[0].logprobs.refusal is None
        content = made.choices[0].logprobs.content
    assert len(content) == len("né👋".encode()) + 1
    assert b"".join(bytes(e.bytes) for e in content).decode() == "né👋"
    assert [e.token for e in content][:2] == ["n", "bytes:\\xc3"]
    assert content[-1].token == "<|im_end|>"
    assert [e.logprob for e in content] == [fake_logprob(t, 0).logprob for t in (*"né👋".encode(), 257)]
    assert all(len(e.top_logprobs) == (top or 0) for e in content)


class _NONE:
    content = None


def test_choices(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="scripted", messages=ASK, n=3)
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert whole.usage.prompt_tokens < 30
    texts, roles, ends = [""] * 3, [0] * 3, [0] * 3
    for chunk in client.chat.completions.create(model="scripted", messages=ASK, n=3, stream=True):
        (choice,) = chunk.choices
        assert not ends[choice.index]
        assert roles[choice.index] or choice.delta.role
        roles[choice.index] += choice.delta.role is not None
        ends[choice.index] += choice.finish_reason is not None
        texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert roles == ends == [1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(client: OpenAI, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.script = Script(reply=f"Let me look.\n{CALL}\n{CALL.replace('Zürich', 'Bern')}")
    made = client.chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER], stream=stream)
    content, calls = "", {}
    if stream:
        for chunk in made:
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.index not in calls
                calls[call.index] = call
            reason = choice.finish_reason
    else:
        (choice,) = made.choices
        content, reason = choice.message.content, choice.finish_reason
        calls = dict(enumerate(choice.message.tool_calls))
    assert content == "Let me look."
    assert reason == "tool_calls"
    assert [json.loads(calls[i].function.arguments)["city"] for i in range(2)] == ["Zürich", "Bern"]
    assert all(
        c.function.name == "weather" and c.type == "function" and c.id.startswith("call_") for c in calls.values()
    )
    assert calls[0].id != calls[1].id
    assert '"name": "weather"' in prompt_of(scripted)


def test_only_a_call(client: OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = Script(reply=CALL)
    (choice,) = client.chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER]).choices
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1


def test_tool_choice_none(client: OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = Script(reply=CALL)
    made = client.chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER], tool_choice="none")
    assert made.choices[0].message.content == CALL
    assert made.choices[0].message.tool_calls is None
    assert made.choices[0].finish_reason == "stop"
    assert "weather" not in prompt_of(scripted)


def test_one_call_at_a_time(client: OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = Script(reply=CALL + CALL)
    made = client.chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER], parallel_tool_calls=False)
    assert len(made.choices[0].message.tool_calls) == 1


def test_cut_call_stays_text(client: OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = Script(reply=CALL)
    made = client.chat.completions.create(model="scripted", messages=ASK, tools=[WEATHER], max_tokens=20)
    assert made.choices[0].message.content == CALL[:20]
    assert made.choices[0].finish_reason == "length"


NOT_CALLS = [
    "<tool_call>{broken}</tool_call>",
    "<tool_call>[]</tool_call>",
    '<tool_call>{"name": 5}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
    "<tool_call> without an end",
    "a < b and <tool_cal",
    "</tool_call>",
    "  spaces  kept  ",
    "\n",
]


@pytest.mark.parametrize("text", NOT_CALLS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_is_no_call_stays_text(text: str, size: int) -> None:
    parser = ToolCallParser()
    pieces = [p for i in range(0, len(text), size) for p in parser.feed(text[i : i + size])] + parser.finish()
    assert all(isinstance(piece, Text) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == text
    assert parser.n_calls == 0


@pytest.mark.parametrize("size", range(1, 12))
def test_calls_at_any_chunking(size: int) -> None:
    text = f"Before.\n\n{CALL} \n{CALL}\nAfter <tool> all."
    parser = ToolCallParser()
    pieces = [p for i in range(0, len(text), size) for p in parser.feed(text[i : i + size])] + parser.finish()
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert [call.index for call in calls] == [0, 1]
    assert "".join(p.text for p in pieces if isinstance(p, Text)) == "Before.\nAfter <tool> all."
