"""The bodies of POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from octavo.api.cache_control import TTL_S
from octavo.api.errors import invalid, shorten, unsupported
from octavo.api.schemas.common import (
    MAX_STOP_STRINGS,
    MAX_TOKENS,
    CacheKey,
    Refused,
    RequestModel,
    cache_division,
)
from octavo.engine.messages import SamplingParams

MAX_BREAKPOINTS = 4

BlockRole = Literal["user", "assistant"]

_REFUSED: Mapping[str, Refused] = {
    "thinking": Refused(({"type": "disabled"},), "thinking is not supported"),
    "output_config": Refused(({},), "effort cannot be set, and constrained decoding is not supported"),
    "output_format": Refused((), "constrained decoding is not supported"),
    "container": Refused((), "containers are not supported"),
    "mcp_servers": Refused(([],), "MCP servers are not supported; offer their tools as tools of the request"),
    "context_management": Refused((), "the server does not edit a conversation; send it as the model shall read it"),
    "speed": Refused(("standard",), "there is one speed"),
}

_REFUSED_IN_TOOLS: Mapping[str, Refused] = {
    "strict": Refused((False,), "it needs constrained decoding, which is not supported; leave it out"),
    "defer_loading": Refused((False,), "tools are always in the prompt"),
    "input_examples": Refused(([],), "examples are not supported; put them into the description"),
    "allowed_callers": Refused((["direct"],), "only the model itself calls tools"),
}


class CacheMark(RequestModel):
    """cache_control of a block."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_name(self) -> str:
        return self.ttl or "5m"

    @property
    def ttl_s(self) -> float:
        return TTL_S[self.ttl_name]


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str
    cache_control: CacheMark | None = None

    @model_validator(mode="after")
    def _has_something_to_cache(self) -> TextBlock:
        if self.cache_control is not None and not self.text:
            raise PydanticCustomError("block", "cache_control cannot be set on an empty text block")
        return self


class ToolUseBlock(RequestModel):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]
    cache_control: CacheMark | None = None

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it, which is OpenAI's shape with arguments parsed."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


def _only(*kinds: str) -> Callable[[object], object]:
    """Checks that a block is of one of these types; the error names the other one."""

    def check(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("block", 'each block must be an object such as {{"type": "text", "text": "..."}}')
        if kind not in kinds:
            told = {"kind": shorten(kind), "kinds": ", ".join(kinds)}
            raise PydanticCustomError("block", "blocks of type {kind} are not supported; supported: {kinds}", told)
        return value

    return check


def _as_blocks(value: object) -> object:
    """Text as one block; None as none."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or an array of blocks")
    return value


TextOnly = Annotated[TextBlock, BeforeValidator(_only("text"))]
Texts = Annotated[list[TextOnly], BeforeValidator(_as_blocks)]


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    is_error: bool | None = None
    cache_control: CacheMark | None = None

    def for_template(self) -> dict[str, Any]:
        """The result as chat templates take it. They know no failed calls, so the text says that one failed."""
        text = joined(self.content)
        content = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "content": content, "tool_call_id": self.tool_use_id}


Block = TextBlock | ToolUseBlock | ToolResultBlock

_TaggedBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(lambda value: f"<{value['type']}>"),
    BeforeValidator(_only("text", "tool_use", "tool_result")),
]


def joined(blocks: Iterable[TextBlock]) -> str:
    """Blocks of one message as its text: by newlines, as parts are joined in /v1/chat/completions."""
    return "\n".join(block.text for block in blocks if block.text)


class Turn(RequestModel):
    """One message: text, or blocks."""

    role: BlockRole
    content: Annotated[list[_TaggedBlock], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Turn:
        for block in self.content:
            if isinstance(block, ToolUseBlock) and self.role != "assistant":
                raise PydanticCustomError("message", "tool_use blocks belong to messages of role 'assistant'")
            if isinstance(block, ToolResultBlock) and self.role != "user":
                raise PydanticCustomError("message", "tool_result blocks belong to messages of role 'user'")
        if self.role == "user" and not self.content:
            raise PydanticCustomError("message", "content of a message of role 'user' must have at least one block")
        return self


class CustomTool(RequestModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheMark | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        if value.get("type") not in (None, "custom"):
            raise PydanticCustomError(
                "tool",
                "tools of type {kind} are the vendor's own and not supported; only custom tools are",
                {"kind": shorten(value["type"])},
            )
        for name, rule in _REFUSED_IN_TOOLS.items():
            if not rule.accepts(value.get(name)):
                told = {"name": name, "value": shorten(value[name]), "reason": rule.reason}
                raise PydanticCustomError("tool", "{name} {value}: {reason}", told)
        return value

    def for_template(self) -> dict[str, Any]:
        """OpenAI's shape, keys in the order of /v1/chat/completions, so that clients of both APIs share pages."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        return {"type": "function", "function": function}


class ToolChoice(RequestModel):
    type: Literal["auto", "none", "any", "tool"]
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(RequestModel):
    """What makes up the prompt."""

    refused: ClassVar[Mapping[str, Refused]] = _REFUSED

    model: str
    messages: list[Turn] = Field(min_length=1)
    system: Texts = Field(default_factory=list)
    tools: list[CustomTool] | None = Field(None, max_length=1024)
    tool_choice: ToolChoice | None = None
    cache_control: CacheMark | None = None

    def check(self) -> None:
        """Rules over more than one field. Raises ApiError."""
        if self.tool_choice is not None:
            kind = self.tool_choice.type
            if kind in ("any", "tool"):
                message = f"tool_choice of type {kind!r}: a call cannot be forced; use 'auto' or 'none'"
                raise unsupported(message, param="tool_choice")
            if kind == "auto" and not self.tools:
                raise invalid("tool_choice of type 'auto' is only allowed with tools", param="tool_choice")
        self._check_results()
        self._check_marks()

    def _check_results(self) -> None:
        """A result answers a call of the message before it."""
        called: set[str] = set()
        for i, turn in enumerate(self.messages):
            if turn.role == "assistant":
                if i and self.messages[i - 1].role == "user":
                    called = set()
                called |= {block.id for block in turn.content if isinstance(block, ToolUseBlock)}
                continue
            for j, block in enumerate(turn.content):
                if isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                    param = f"messages[{i}].content[{j}].tool_use_id"
                    message = f"{param}: the assistant's message before has no tool_use with the id"
                    raise invalid(f"{message} {shorten(block.tool_use_id)}", param=param)

    def _check_marks(self) -> None:
        marks = [(where, mark) for where, mark in self._marks() if mark is not None]
        if len(marks) > MAX_BREAKPOINTS:
            message = f"at most {MAX_BREAKPOINTS} blocks may have cache_control, got {len(marks)}"
            raise invalid(message, param=marks[MAX_BREAKPOINTS][0])
        short: str | None = None
        for where, mark in marks:
            if mark.ttl_name == "5m":
                short = short or where
            elif short is not None:
                message = f"{where} with ttl '1h' must not come after {short} with ttl '5m'"
                raise invalid(f"{message}; blocks are taken in the order tools, system, messages", param=where)

    def _marks(self) -> Iterator[tuple[str, CacheMark | None]]:
        """Every place of a cache_control, in the order that counts."""
        for i, tool in enumerate(self.tools or ()):
            yield f"tools[{i}].cache_control", tool.cache_control
        for i, block in enumerate(self.system):
            yield f"system[{i}].cache_control", block.cache_control
        for i, turn in enumerate(self.messages):
            for j, part in enumerate(turn.content):
                where = f"messages[{i}].content[{j}]"
                if isinstance(part, ToolResultBlock):
                    for k, inner in enumerate(part.content):
                        yield f"{where}.content[{k}].cache_control", inner.cache_control
                yield f"{where}.cache_control", part.cache_control
        yield "cache_control", self.cache_control

    @property
    def offered_tools(self) -> list[CustomTool]:
        """None of them for tool_choice "none"."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return self.tools or []

    @property
    def parallel_tools(self) -> bool:
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)


class Metadata(RequestModel):
    user_id: str | None = Field(None, max_length=512)


class MessagesRequest(CountTokensRequest):
    """`cache_salt` is vLLM's, as on the other routes."""

    max_tokens: int = Field(ge=0, le=MAX_TOKENS)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_TOKENS)
    stop_sequences: list[Annotated[str, StringConstraints(min_length=1)]] | None = Field(
        None, max_length=MAX_STOP_STRINGS
    )
    metadata: Metadata | None = None
    stream: bool | None = None
    cache_salt: CacheKey | None = None

    @property
    def cache_division(self) -> str:
        return cache_division(self.cache_salt)

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
        )
