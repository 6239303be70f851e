"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from octavo.api.errors import invalid, shorten, unsupported
from octavo.api.schemas.common import MAX_TOKENS, REFUSED_EVERYWHERE, Refused, RequestModel, SamplingFields
from octavo.engine.messages import MAX_LOGPROBS

Role = Literal["system", "developer", "user", "assistant", "tool"]

_TEMPLATE = "the model's own chat template is used as it is"

_REFUSED_IN_CHAT: Mapping[str, Refused] = {
    **REFUSED_EVERYWHERE,
    "response_format": Refused(({"type": "text"},), "constrained decoding is not supported"),
    "functions": Refused(([],), "functions are deprecated; use tools"),
    "function_call": Refused(("none",), "function_call is deprecated; use tools"),
    "audio": Refused((), "audio is not supported"),
    "modalities": Refused((["text"],), "only text is supported"),
    "web_search_options": Refused((), "web search is not supported"),
    "moderation": Refused((), "moderation is not supported"),
    "reasoning_effort": Refused(("none",), "reasoning effort cannot be set"),
    "verbosity": Refused(("medium",), "verbosity cannot be set"),
    "chat_template": Refused((), _TEMPLATE),
    "chat_template_kwargs": Refused(({},), _TEMPLATE),
    "continue_final_message": Refused((False,), "an answer cannot be continued through chat; use /v1/completions"),
    "add_special_tokens": Refused((False,), _TEMPLATE),
    "documents": Refused(([],), "documents are not supported"),
    "best_of": Refused((1,), "best_of is not supported; use n"),
    "echo": Refused((False,), "echo is not supported in chat; use /v1/completions"),
    "suffix": Refused((), "suffix is not supported"),
}


class FunctionCall(RequestModel):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(RequestModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(RequestModel):
    """One message. `content` is text: parts of type "text" are joined by newlines."""

    role: Role
    content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: object) -> object:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise PydanticCustomError("content", "must be a string or an array of text parts")
        return "\n".join(_part_text(part) for part in value)

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_forms(cls, value: object) -> object:
        if isinstance(value, dict):
            for name in ("function_call", "audio"):
                if value.get(name) is not None:
                    raise PydanticCustomError("message", f"{name} in a message is not supported")
        return value

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("message", "content is required, except beside tool_calls of an assistant")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("message", "tool_calls belong to messages of role 'assistant'")
        return self

    def for_template(self, position: int) -> dict[str, Any]:
        """The message as chat templates take it: arguments of tool calls parsed, "developer" read as
        "system"."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                _call_for_template(call, f"messages[{position}].tool_calls[{i}]")
                for i, call in enumerate(self.tool_calls)
            ]
        return message


def _part_text(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError("content", 'each part must be an object such as {{"type": "text", "text": "..."}}')
    if kind not in ("text", "refusal"):
        raise PydanticCustomError(
            "content", "parts of type {kind} are not supported; only text is", {"kind": shorten(kind)}
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise PydanticCustomError("content", "{kind} of a {kind} part must be a string", {"kind": kind})
    return text


def _call_for_template(call: ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = from_json(call.function.arguments or "{}", allow_inf_nan=False)
    except ValueError as error:
        param = f"{where}.function.arguments"
        raise invalid(f"{param} must be a JSON object in a string: {error}", param=param) from None
    if not isinstance(arguments, dict):
        param = f"{where}.function.arguments"
        raise invalid(f"{param} must be a JSON object in a string, got {shorten(arguments)}", param=param)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class Function(RequestModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("strict")
    @classmethod
    def _not_strict(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError("strict", "true needs constrained decoding, which is not supported; leave it out")
        return value


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


class ChatCompletionRequest(SamplingFields):
    refused: ClassVar[Mapping[str, Refused]] = _REFUSED_IN_CHAT

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None

    def check(self) -> None:
        """Rules over more than one field. Raises ApiError."""
        self.check_streaming()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            message = f"max_tokens {both[0]} and max_completion_tokens {both[1]} differ; send one of them"
            raise invalid(message, param="max_completion_tokens")
        if self.tool_choice not in (None, "none", "auto"):
            message = f"tool_choice {shorten(self.tool_choice)}: a call cannot be forced; use 'auto' or 'none'"
            raise unsupported(message, param="tool_choice")
        if self.tool_choice == "auto" and not self.tools:
            raise invalid("tool_choice 'auto' is only allowed with tools", param="tool_choice")

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the template, top-level keys in one order so that permuted clients share pages; None
        for "none"."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]
