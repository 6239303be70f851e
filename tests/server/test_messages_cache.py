"""What Anthropic's fields ask of the cache and say about it: breakpoints in tokens, usage cold and warm, turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic

from octavo.api.anthropic_prompt import build_prompt
from octavo.api.cache_control import Breakpoint, CacheControl, messages_usage
from octavo.api.schemas.messages import CountTokensRequest
from octavo.config import CachePolicy, EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.client import EngineClient
from octavo.engine.engine import Engine
from octavo.models.loading.gguf import open_gguf
from octavo.text.gguf_tokenizer import tokenizer_from_gguf
from octavo.text.tokenizer import Tokenizer

from .conftest import SETTINGS, anthropic_client
from .running import RunningServer, running_server
from .scripted import PAGE_SIZE, ChatByteTokenizer, Script, ScriptedEngine

MINUTES: dict[str, Any] = {"type": "ephemeral"}
HOUR: dict[str, Any] = {"type": "ephemeral", "ttl": "1h"}
STORY = "The harbour lay still under a pale sky, and the boats that had come in before dawn rocked against the stones. "


def text(words: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": words, **({"cache_control": mark} if mark else {})}


def tool(name: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    made = {"name": name, "description": f"What {name} does", "input_schema": schema}
    return {**made, **({"cache_control": mark} if mark else {})}


def body(**fields: Any) -> CountTokensRequest:
    made = CountTokensRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})
    made.check()
    return made


# Where blocks end

CASES: list[tuple[dict[str, Any], list[str]]] = [
    # Marks, and how the text before each of them ends.
    ({"system": [text("one", HOUR), text("two", MINUTES)]}, ["one", "two"]),
    ({"messages": [{"role": "user", "content": [text("first", MINUTES), text("second", MINUTES)]}]},
     ["first", "second"]),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [text("answer", MINUTES)]},
                   {"role": "user", "content": "go on"}]}, ["answer"]),
    ({"system": "be brief", "messages": [{"role": "user", "content": "q"}], "cache_control": HOUR}, ["q"]),
    ({"system": [text("be brief", HOUR)], "messages": [{"role": "user", "content": [text("q", MINUTES)]},
                                                        {"role": "assistant", "content": "It is"}]}, ["be brief", "q"]),
]  # fmt: skip


def ends(tokenizer: Tokenizer, request: CountTokensRequest) -> list[str]:
    """The text before each breakpoint. Every one is a prefix of the prompt."""
    prompt = build_prompt(tokenizer, request)
    assert all(0 <= b.token_index <= len(prompt.token_ids) for b in prompt.control.breakpoints)
    return [tokenizer.decode(prompt.token_ids[: b.token_index], skip_special=False) for b in prompt.control.breakpoints]


def after(prefix: str, block_end: str) -> str:
    """What a prefix holds past the end of the block that it should end with."""
    assert block_end in prefix, prefix
    return prefix[prefix.rindex(block_end) + len(block_end) :]


#: A prefix may go past its block by what the template writes between this block and whatever follows.
LAYOUT = {"", "\n", "<|im_end|>", "<|im_end|>\n", "<|im_end|>\n<|im_start|>user\n"}


@pytest.mark.parametrize("tokenizer_of", ["bytes", "smollm2", "qwen_coder"])
@pytest.mark.parametrize(("fields", "expected"), CASES, ids=range(len(CASES)))
def test_breakpoints_in_tokens(
    request: pytest.FixtureRequest, tokenizer_of: str, fields: dict[str, Any], expected: list[str]
) -> None:
    found = ends(tokenizer(request, tokenizer_of), body(**fields))
    assert len(found) == len(expected)
    for prefix, block_end in zip(found, expected, strict=True):
        assert after(prefix, block_end) in LAYOUT


def tokenizer(request: pytest.FixtureRequest, name: str) -> Tokenizer:
    if name == "bytes":
        return ChatByteTokenizer()
    path = request.getfixturevalue(name)
    return tokenizer_from_gguf(open_gguf(path).metadata, str(path))


def test_tools_before_the_system_text() -> None:
    """The scripted template writes tools first: a mark on one ends there."""
    request = body(tools=[tool("first", HOUR), tool("second", MINUTES)], system="Be brief.")
    one, two = ends(ChatByteTokenizer(), request)
    assert one.endswith("}")
    assert "What first does" in one
    assert "second" not in one
    assert "What second does" in two
    assert "Be brief" not in two


def test_tools_after_the_system_text(request: pytest.FixtureRequest) -> None:
    """Qwen's template writes them last: a mark on a tool takes the system's text in."""
    made = body(tools=[tool("first", HOUR), tool("second", MINUTES)], system="Be brief.")
    one, two = ends(tokenizer(request, "qwen_coder"), made)
    assert "Be brief." in one
    assert "What first does" in one
    assert "What second does" not in one
    assert "What second does" in two


@pytest.mark.parametrize("tokenizer_of", ["bytes", "qwen_coder"])
def test_tools_without_a_system_text(request: pytest.FixtureRequest, tokenizer_of: str) -> None:
    made = body(tools=[tool("first", HOUR), tool("second", MINUTES)])
    one, two = ends(tokenizer(request, tokenizer_of), made)
    assert "What first does" in one
    assert "What second does" not in one
    assert "What second does" in two
    assert "hi" not in two.rpartition("user\n")[2]


def test_marks_on_tools_and_results() -> None:
    request = body(
        tools=[tool("f")],
        messages=[
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1},
                                               "cache_control": HOUR}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [text("inner", MINUTES)]},
                {"type": "tool_result", "tool_use_id": "1", "content": "outer", "cache_control": MINUTES}]},
        ],
    )  # fmt: skip
    call, inner, outer = ends(ChatByteTokenizer(), request)
    assert after(call, '{"a": 1}}') in LAYOUT
    assert after(inner, "inner") in {*LAYOUT, "<|im_end|>\n<|im_start|>"}
    assert after(outer, "outer") in LAYOUT


def test_tools_that_are_not_offered_mark_nothing() -> None:
    request = body(tools=[tool("f", HOUR)], tool_choice={"type": "none"})
    assert build_prompt(ChatByteTokenizer(), request).control == CacheControl()


# Usage


def test_usage_is_split_by_lifetime() -> None:
    def usage(*breakpoints: tuple[int, float], cached: int = 0) -> tuple[int, int, int, int]:
        control = CacheControl(tuple(Breakpoint(*b) for b in breakpoints))
        told = messages_usage(control, page_size=10, prompt_tokens=100, cached_tokens=cached, output_tokens=7)
        created = told["cache_creation_input_tokens"]
        assert told["input_tokens"] + created + told["cache_read_input_tokens"] == 100
        assert (told["cache_read_input_tokens"], told["output_tokens"]) == (cached, 7)
        assert sum(told["cache_creation"].values()) == created  # type: ignore[arg-type]
        return (*told["cache_creation"].values(), created, told["input_tokens"])  # type: ignore[return-value]

    assert usage() == (0, 0, 0, 100)
    assert usage((9, 300.0)) == (0, 0, 0, 100)
    assert usage((45, 3600.0), (99, 300.0)) == (50, 40, 90, 10)
    assert usage((45, 3600.0), (99, 300.0), cached=30) == (50, 10, 60, 10)
    assert usage((45, 3600.0), (99, 300.0), cached=60) == (30, 0, 30, 10)
    assert usage((100, 300.0), cached=90) == (10, 0, 10, 0)
    assert usage((45, 300.0), cached=90) == (0, 0, 0, 10)
    # A template may put a block of five minutes before one of an hour.
    assert usage((80, 3600.0), (20, 300.0)) == (0, 80, 80, 20)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_cold_and_warm(any_claude: Anthropic, any_engine: EngineClient, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": "model", "max_tokens": 2, "system": [text(f"{stream}: {STORY}", HOUR)],
        "messages": [{"role": "user", "content": [text(STORY, MINUTES), text(STORY)]}],
        "extra_body": {"temperature": 0, "cache_salt": f"usage {stream}"},
    }  # fmt: skip

    def usage() -> Any:
        if not stream:
            return any_claude.messages.create(**options).usage
        with any_claude.messages.stream(**options) as events:
            started = [e.message.usage.to_dict() for e in events if e.type == "message_start"]
            ended = events.get_final_message().usage
        assert started == [{**ended.to_dict(), "output_tokens": 0}]
        return ended

    cold, warm = usage(), usage()
    page = any_engine.info.page_size
    total = cold.input_tokens + cold.cache_creation_input_tokens
    assert cold.cache_read_input_tokens == 0
    assert cold.cache_creation_input_tokens % page == 0
    assert cold.cache_creation.ephemeral_1h_input_tokens >= len(STORY) // page * page - page > 0
    assert cold.cache_creation.ephemeral_5m_input_tokens > 0
    split = cold.cache_creation.ephemeral_1h_input_tokens + cold.cache_creation.ephemeral_5m_input_tokens
    assert split == cold.cache_creation_input_tokens
    assert cold.input_tokens >= len(STORY) - page
    assert warm.cache_read_input_tokens >= (total - 1) // page * page
    assert warm.cache_read_input_tokens + warm.input_tokens + warm.cache_creation_input_tokens == total
    assert warm.cache_creation_input_tokens == 0


def test_without_marks_nothing_is_created(any_claude: Anthropic) -> None:
    asked = any_claude.messages.create(
        model="model", max_tokens=1, messages=[{"role": "user", "content": "unmarked " + STORY}]
    )
    assert asked.usage.cache_creation_input_tokens == 0
    assert asked.usage.cache_creation.ephemeral_5m_input_tokens == 0


def test_without_a_prefix_cache_nothing_is_created() -> None:
    engine = ScriptedEngine(prefix_cache=False)
    with running_server(engine, SETTINGS) as server, anthropic_client(server) as sdk:
        asked = sdk.messages.create(
            model="scripted", max_tokens=1, messages=[{"role": "user", "content": [text(STORY, HOUR)]}]
        )
    assert (asked.usage.cache_creation_input_tokens, asked.usage.cache_read_input_tokens) == (0, 0)


# Five turns, each with the answers before it as the SDK gave them

SAYS = [
    "Hello\n\n\nthere",
    "emoji 🧑‍🚀🏳️‍🌈 and 漢字",
    "<think>hm</think> go on",
    "  spaces   kept\t",
    "<|im_end|> bye",
]


def test_five_turns_scripted(claude: Anthropic, scripted: ScriptedEngine) -> None:
    scripted.info = replace(scripted.info, max_model_len=2048)
    messages: list[Any] = []
    previous = 0
    for turn, says in enumerate(SAYS):
        scripted.script = Script(reply=f"\nAnswer {turn}:\n  <think>é👋</think>\t{says}\n")
        messages.append({"role": "user", "content": [text(says, MINUTES if turn < 4 else None)]})
        answer = claude.messages.create(model="scripted", max_tokens=200, system=STORY, messages=messages)
        assert answer.usage.cache_read_input_tokens >= previous // PAGE_SIZE * PAGE_SIZE
        previous = scripted.requests[-1].prompt_token_ids.size - 1
        assert answer.content[0].text == scripted.script.reply
        messages.append({"role": "assistant", "content": answer.content})


PAGE = 32


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    config = EngineConfig(
        threads=2, page_size=PAGE, kv_memory_bytes=64 << 20, max_num_seqs=4, step_tokens=128, max_model_len=1024,
        policy=CachePolicy("int8", "int8"),
    )  # fmt: skip
    engine = build_engine(str(smollm2), config, "smollm2")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def real(engine: Engine) -> Iterator[RunningServer]:
    with running_server(engine, replace(SETTINGS, drain_s=5)) as server:
        yield server


def test_five_turns(real: RunningServer) -> None:
    """Each turn hits the pages of the prompt before it, and says what it says with a cache of its own."""
    messages: list[Any] = []
    previous = 0
    with anthropic_client(real) as plain:
        sdk = plain.with_options(timeout=120)
        for turn, says in enumerate(SAYS):
            mark = {"cache_control": MINUTES} if turn == 4 else {}
            messages.append({"role": "user", "content": [{"type": "text", "text": says, **mark}]})
            options: dict[str, Any] = {
                "model": "smollm2", "max_tokens": 24, "system": "You answer briefly.\n\n" + STORY * 2,
                "messages": messages,
            }  # fmt: skip
            with sdk.messages.stream(**options, extra_body={"temperature": 0}) as stream:
                warm = stream.get_final_message()
            salted = {"temperature": 0, "cache_salt": f"five-{turn}"}
            cold = sdk.messages.create(**options, extra_body=salted)
            assert cold.usage.cache_read_input_tokens == 0
            assert warm.usage.cache_read_input_tokens >= previous // PAGE * PAGE
            assert [b.text for b in warm.content] == [b.text for b in cold.content]
            assert (warm.stop_reason, warm.usage.output_tokens) == (cold.stop_reason, cold.usage.output_tokens)
            total = sdk.messages.count_tokens(model="smollm2", system=options["system"], messages=messages).input_tokens
            for usage in (warm.usage, cold.usage):
                assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == total
            previous = total - 1
            messages.append({"role": "assistant", "content": warm.content})
        assert 0 < warm.usage.cache_creation_input_tokens < cold.usage.cache_creation_input_tokens


def test_an_answer_that_the_client_began(real: RunningServer, engine: Engine) -> None:
    """The model goes on from the client's words: what it says is what it would have said after them by itself."""
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 16, "extra_body": {"temperature": 0}}
    hello = [{"role": "user", "content": "Count from one to ten."}]
    with anthropic_client(real) as plain:
        sdk = plain.with_options(timeout=120)
        whole = sdk.messages.create(messages=hello, **asked).content[0].text
        begun = engine.tokenizer.decode(engine.tokenizer.encode(whole, add_special=False)[:5])
        rest = sdk.messages.create(messages=[*hello, {"role": "assistant", "content": begun}], **asked)
    assert (begun + rest.content[0].text).startswith(whole)


def test_a_template_that_cannot_continue(claude: Anthropic, scripted: ScriptedEngine) -> None:
    """One that begins its own answers otherwise than it writes the old ones."""
    import anthropic

    template = scripted.tokenizer.apply_chat_template

    def begins_with_a_thought(*args: Any, **options: Any) -> list[int]:
        tokens = template(*args, **options)
        return [*tokens, *b"<think>"] if options["add_generation_prompt"] else tokens

    scripted.tokenizer.apply_chat_template = begins_with_a_thought  # type: ignore[method-assign]
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The"}]
    with pytest.raises(anthropic.BadRequestError, match="cannot continue the last message"):
        claude.messages.create(model="scripted", max_tokens=5, messages=messages)
