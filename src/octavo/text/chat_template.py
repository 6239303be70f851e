"""Messages in OpenAI's shape -> the text of a prompt, by the model's own Jinja template.

Users must not be able to write a control token into their text and so forge a turn. What a template writes
itself may be a control token; what messages and tools bring may not. `ControlGuard` breaks control tokens
inside message strings with a marker before rendering; the markers are taken out again once the control tokens
of the rendered text have been found. Strings that hold no such text pass through untouched, so a template
sees them exactly as they are. Not covered is a template that deletes or changes characters inside a string
and so makes a token of text that was none ("<|IM_END|>" in lower case).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jinja2

from octavo.errors import LoadError, RequestError
from octavo.text.special import SpecialToken, SpecialTokens
from octavo.text.template_sandbox import RENDER_ERRORS, SandboxedTemplate

KNOWN_ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "model",
    "ipython",
    "observation",
)

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Markers are noncharacters, which valid text for interchange does not hold.
_MARKERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


class ChatTemplate:
    """A model's chat template.

    `variables` are what templates expect beside the messages, such as bos_token. Raises LoadError for a
    source that is not a Jinja template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], where: str) -> None:
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = SandboxedTemplate(source)
        except jinja2.TemplateError as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise LoadError(f"{where}: the chat template is not valid Jinja{line}: {error}") from error

    def render(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, *, add_generation_prompt: bool = True
    ) -> str:
        """`messages` and `tools` as `prepare_messages` and ControlGuard left them. Raises RequestError."""
        try:
            return self._template.render(
                {
                    **self._variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RENDER_ERRORS as error:
            raise RequestError(
                f"the model's chat template does not take these messages: {error}", param="messages"
            ) from error


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's shape -> what templates expect: text parts joined, arguments of tool calls as objects.

    Raises RequestError naming the message.
    """
    return [_prepare(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _prepare(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, is {type(message).__name__}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(f"{where}.role must be a word such as user, got {role!r}", param=f"{where}.role")
    prepared = dict(message)
    content = prepared.get("content")
    if isinstance(content, list | tuple):
        prepared["content"] = "".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be text or a list of parts, is {type(content).__name__}",
            param=f"{where}.content",
        )
    calls = prepared.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple):
            raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
        prepared["tool_calls"] = [_prepare_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return prepared


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text"):
        raise RequestError(f"{where}: parts of type {kind!r} are not supported; only text is", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be text, is {type(text).__name__}", param=f"{where}.text")
    return text


def _prepare_call(call: Any, where: str) -> dict[str, Any]:
    """Arguments arrive as JSON text; templates write them with `tojson` and so expect the object."""
    if not isinstance(call, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    prepared = dict(call)
    function = prepared.get("function")
    if isinstance(function, Mapping):
        prepared["function"] = _with_arguments(function, f"{where}.function")
    elif "arguments" in prepared:
        prepared = _with_arguments(prepared, where)
    return prepared


def _with_arguments(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    prepared = dict(function)
    arguments = prepared.get("arguments")
    if isinstance(arguments, str):
        try:
            prepared["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RequestError(f"{where}.arguments is not JSON: {error}", param=f"{where}.arguments") from error
    return prepared


class ControlGuard:
    """Breaks control tokens in strings, and the ends of strings that could become one beside another string.

    A token "<|im_end|>" inside a string gets the marker after its first character. A string that ends with a
    part of a token ("<|im_") or starts with the rest of one gets the marker at that end, so that no two
    strings which a template puts side by side make a token together.
    """

    def __init__(self, control_texts: Iterable[str]) -> None:
        self._texts = {text for text in control_texts if text}
        self._tokens = SpecialTokens(SpecialToken(0, text) for text in self._texts)
        self._heads = _prefixes(self._texts)
        self._tails = _prefixes(text[::-1] for text in self._texts)

    def check_role(self, role: str, where: str) -> None:
        """Templates build control tokens from roles ("<|" + role + "|>"); made-up ones must not do so."""
        if role not in KNOWN_ROLES and any(role in text for text in self._texts):
            raise RequestError(f"{where}: {role!r} is not a role; known: {', '.join(KNOWN_ROLES)}", param=where)

    def marker_for(self, values: Iterable[Any]) -> str:
        """A character that occurs in none of the values' strings."""
        used: set[str] = set()
        for text in _strings(values):
            if not text.isascii():
                used.update(c for c in _MARKERS if c in text)
        free = [c for c in _MARKERS if c not in used]
        if not free:
            raise RequestError("the messages hold all 32 noncharacters U+FDD0 to U+FDEF", param="messages")
        return free[0]

    def guard(self, value: Any, marker: str) -> Any:
        """A copy of nested lists and dicts with all strings guarded, except a message's role."""
        if isinstance(value, str):
            return self._guard_text(value, marker)
        if isinstance(value, Mapping):
            return {
                self._guard_text(k, marker) if isinstance(k, str) else k: v
                if k == "role" and isinstance(v, str) and _ROLE.fullmatch(v)
                else self.guard(v, marker)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guard(v, marker) for v in value]
        return value

    def _guard_text(self, text: str, marker: str) -> str:
        cuts = [0]
        while (found := self._tokens.find(text, cuts[-1])) is not None:
            # On from the next character, not from the token's end: tokens may overlap.
            cuts.append(found[0] + 1)
        if len(cuts) > 1:
            text = marker.join(text[a:b] for a, b in pairwise([*cuts, len(text)]))
        # Templates often trim, so the ends that count are those of the trimmed text.
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if start < end:
            if _has_overlap(text[start:end], self._heads):
                text = text[:end] + marker + text[end:]
            if _has_overlap(text[start:end][::-1], self._tails):
                text = text[:start] + marker + text[start:]
        return text


def _prefixes(texts: Iterable[str]) -> dict[str, set[str]]:
    """Proper prefixes, by their last character."""
    found: dict[str, set[str]] = {}
    for text in texts:
        for length in range(1, len(text)):
            found.setdefault(text[length - 1], set()).add(text[:length])
    return found


def _has_overlap(text: str, prefixes: Mapping[str, set[str]]) -> bool:
    """Whether the text ends with one of the prefixes."""
    return any(text.endswith(prefix) for prefix in prefixes.get(text[-1], ()))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _strings(k)
            yield from _strings(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _strings(v)
