"""Tool calls in a model's text, in the form of Hermes and Qwen: <tool_call>{"name": ..., "arguments":
{...}}</tool_call>.

The text is read as it streams. What is not a complete, well-formed call stays text, so nothing that the model
wrote is lost and no call is made up.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from pydantic_core import from_json

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


class FunctionObject(TypedDict):
    name: str
    arguments: str


class ToolCallObject(TypedDict):
    id: str
    type: str
    function: FunctionObject


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    index: int
    call: ToolCallObject


Piece = Text | Call


class ToolCallParser:
    """Feed it deltas, read pieces; `finish` gives what was held back. One parser per choice.

    White space around calls is dropped. With `parallel` False calls after the first are dropped, as a client
    asks for
    by parallel_tool_calls: false.
    """

    def __init__(self, *, parallel: bool = True) -> None:
        self.n_calls = 0
        self._parallel = parallel
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        return list(self._pieces())

    def finish(self) -> list[Piece]:
        rest, self._held = self._held, ""
        # White space between calls is layout, not content.
        return [Text(rest)] if rest.strip() or (not self.n_calls and rest) else []

    def _pieces(self) -> Iterator[Piece]:
        while self._held:
            start = self._held.find(OPEN_TAG)
            if start < 0:
                safe = self._safe_length()
                text, self._held = self._held[:safe], self._held[safe:]
                yield from self._text(text)
                return
            end = self._held.find(CLOSE_TAG, start)
            if end < 0:
                text, self._held = self._held[:start].rstrip(), self._held[start:]
                yield from self._text(text)
                return
            before, raw = self._held[:start], self._held[start : end + len(CLOSE_TAG)]
            self._held = self._held[end + len(CLOSE_TAG) :]
            call = _parse_call(raw[len(OPEN_TAG) : -len(CLOSE_TAG)])
            if call is None:
                yield from self._text(before + raw)
                continue
            yield from self._text(before.rstrip())
            if self._parallel or self.n_calls == 0:
                yield Call(self.n_calls, call)
                self.n_calls += 1

    def _text(self, text: str) -> Iterator[Piece]:
        if self.n_calls and not text.strip():
            return
        if text:
            yield Text(text)

    def _safe_length(self) -> int:
        """How much of the held text can no longer be white space before a tag, or the beginning of a tag."""
        length = len(self._held)
        for size in range(min(len(OPEN_TAG) - 1, length), 0, -1):
            if self._held.endswith(OPEN_TAG[:size]):
                length -= size
                break
        return len(self._held[:length].rstrip())


def read_pieces(parser: ToolCallParser | None, text: str, *, last: bool) -> list[Piece]:
    """The next text of an answer as text and calls. Without a parser, for no tools were offered, all of it is text."""
    if parser is None:
        return [Text(text)] if text else []
    return parser.feed(text) + (parser.finish() if last else [])


def _parse_call(text: str) -> ToolCallObject | None:
    """The call that `text` spells out, or None. Arguments are written again as JSON, so that they are always
    valid."""
    try:
        value = from_json(text.strip(), allow_inf_nan=False)
        name, arguments = (value.get("name"), value.get("arguments", {})) if isinstance(value, dict) else (None, None)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        spelled = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    function: FunctionObject = {"name": name, "arguments": spelled}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
