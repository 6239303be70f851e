"""From Anthropic's blocks to a prompt: messages as chat templates take them, answers begun by the client, and where the
blocks that are to be cached end, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from octavo.api.cache_control import Breakpoint, CacheControl
from octavo.api.errors import invalid
from octavo.api.openai_chat import render_messages
from octavo.api.schemas.messages import (
    Block,
    BlockRole,
    CacheMark,
    CountTokensRequest,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    joined,
)
from octavo.errors import RequestError
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    control: CacheControl


@dataclass(frozen=True, slots=True)
class _Placed:
    """A block and whose it is."""

    role: BlockRole
    block: Block


def build_prompt(tokenizer: Tokenizer, body: CountTokensRequest) -> Prompt:
    """Raises ApiError and RequestError."""
    return _Conversation(tokenizer, body).prompt()


class _Conversation:
    """A request's blocks, and what the model's template makes of all or of the first of them."""

    def __init__(self, tokenizer: Tokenizer, body: CountTokensRequest) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._tools = [tool.for_template() for tool in body.offered_tools]
        self._blocks = _placed_blocks(body)

    def prompt(self) -> Prompt:
        messages = as_messages(self._body.system, self._blocks)
        token_ids = self._continued(messages) if messages[-1]["role"] == "assistant" else self._render(messages, True)
        return Prompt(token_ids, self._control(token_ids))

    def _render(
        self, messages: list[dict[str, Any]], generate: bool, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        offered = self._tools if tools is None else tools
        return render_messages(self._tokenizer, messages, offered or None, generate)

    def _continued(self, messages: list[dict[str, Any]]) -> list[int]:
        """A prompt that ends inside the last message, for the model to go on from.

        What the template writes to end a message is what stays the same when the message grows. The rest must read as
        the beginning of an answer followed by the message's text, else the model would see something it never writes.
        """
        *before, last = messages
        text = last["content"]
        if "tool_calls" in last:
            raise invalid("messages end with a tool_use; its tool_result must follow", param="messages")
        if not before:
            raise invalid("messages must begin with one of role 'user'", param="messages")
        grown = text + ("x" if not text.endswith("x") else "y")
        whole = self._render(messages, False)
        other = self._render([*before, {**last, "content": grown}], False)
        token_ids = whole[: len(whole) - common_prefix(whole[::-1], other[::-1])]
        beginning = self._render(before, True)
        if self._text(token_ids) != self._text(beginning) + text:
            message = "this model's chat template cannot continue the last message, which is the assistant's"
            raise invalid(
                f"{message}: end with a message of role 'user', or without space at its ends", param="messages"
            )
        return token_ids

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=False)

    # Breakpoints

    def _control(self, token_ids: list[int]) -> CacheControl:
        """Each mark's place in the prompt: what the prompt has in common with the rendering of the blocks up to it.

        Templates end messages, so a rendered beginning need not be the beginning of the whole; what both have in common
        is, and every later request with these blocks has it too.
        """
        body, found = self._body, list[Breakpoint]()
        for i, tool in enumerate(body.offered_tools, 1):
            if tool.cache_control:
                found.append(Breakpoint(self._tools_end(token_ids, i), tool.cache_control.ttl_s))
        for i, block in enumerate(body.system, 1):
            if block.cache_control:
                end = self._system_end(token_ids, body.system[:i], self._tools)
                found.append(Breakpoint(end, block.cache_control.ttl_s))
        for i, placed in enumerate(self._blocks, 1):
            found += [Breakpoint(self._block_end(token_ids, i), mark.ttl_s) for mark in _marks(placed.block)]
        if body.cache_control:  # stands for one on the last block
            found.append(Breakpoint(self._block_end(token_ids, len(self._blocks)), body.cache_control.ttl_s))
        return CacheControl(tuple(found))

    def _block_end(self, token_ids: list[int], n_blocks: int) -> int:
        return self._common(token_ids, as_messages(self._body.system, self._blocks[:n_blocks]), self._tools)

    def _system_end(self, token_ids: list[int], system: Sequence[TextBlock], tools: list[dict[str, Any]]) -> int:
        """Many templates want a message after the system's text: one that differs from the real one at once."""
        first = as_messages([], self._blocks)[0]["content"].lstrip()
        probe = {"role": "user", "content": "y" if first.startswith("x") else "x"}
        return self._common(token_ids, [*as_messages(system, []), probe], tools)

    def _tools_end(self, token_ids: list[int], n_tools: int) -> int:
        """Some templates write tools before the system's text, some after it: then a prefix that holds a tool holds
        that text too. Told apart by whether the tool counts where another system text follows."""
        system, tools = self._body.system, self._tools[:n_tools]
        text = joined(system)
        if not text:
            return self._system_end(token_ids, system, tools)
        other = [TextBlock(type="text", text="y" if text.lstrip().startswith("x") else "x")]
        with_tool = self._system_end(token_ids, other, tools)
        without = self._system_end(token_ids, other, tools[:-1])
        return with_tool if with_tool > without else self._system_end(token_ids, system, tools)

    def _common(self, token_ids: list[int], messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        try:
            return common_prefix(token_ids, self._render(messages, False, tools))
        except RequestError:
            return 0  # the template takes the whole but not this much of it, so nothing can be promised


def _placed_blocks(body: CountTokensRequest) -> list[_Placed]:
    """The blocks of all messages. An empty message of the assistant keeps its turn, except at the end, where it asks
    for an answer as no message does."""
    empty = TextBlock(type="text", text="")
    placed = [_Placed(turn.role, block) for turn in body.messages for block in turn.content or [empty]]
    while len(placed) > 1 and placed[-1].role == "assistant" and placed[-1].block == empty:
        placed.pop()
    return placed


def _marks(block: Block) -> list[CacheMark]:
    """A mark inside a tool's result stands for the result."""
    inner = [part.cache_control for part in block.content] if isinstance(block, ToolResultBlock) else []
    return [mark for mark in (*inner, block.cache_control) if mark is not None]


def as_messages(system: Sequence[TextBlock], blocks: Sequence[_Placed]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Neighbours of one role are one message; results are messages of their
    own."""
    messages: list[dict[str, Any]] = []
    if text := joined(system):
        messages.append({"role": "system", "content": text})
    for (role, is_result), group in groupby(blocks, lambda p: (p.role, isinstance(p.block, ToolResultBlock))):
        found = [placed.block for placed in group]
        if is_result:
            messages += [block.for_template() for block in found if isinstance(block, ToolResultBlock)]
            continue
        message: dict[str, Any] = {
            "role": role,
            "content": joined(block for block in found if isinstance(block, TextBlock)),
        }
        if calls := [block.for_template() for block in found if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = calls
        messages.append(message)
    return messages


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    n = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(differing[0]) if differing.size else n
