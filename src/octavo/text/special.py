"""Control tokens: finding their strings in text that may hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Control tokens that end a turn or a text, whatever key of a file names them: all families write them alike.
TURN_ENDS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")
)


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A control token such as "<|im_end|>".

    Attributes:
        lstrip, rstrip: whether it swallows the whitespace before and after it.
        single_word: whether it only counts where no word character touches it.
    """

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class SpecialTokens:
    """Splits text at control tokens: leftmost match first, the longest where several start at one place."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self.by_text: Mapping[str, SpecialToken] = {token.text: token for token in tokens if token.text}
        self._lengths = sorted({len(text) for text in self.by_text}, reverse=True)
        firsts = "".join(sorted({re.escape(text[0]) for text in self.by_text}))
        self._start = re.compile(f"[{firsts}]") if firsts else None

    def find(self, text: str, at: int) -> tuple[int, SpecialToken] | None:
        """The first control token at or after `at`, with where it starts."""
        if self._start is None:
            return None
        for match in self._start.finditer(text, at):
            start = match.start()
            for length in self._lengths:
                token = self.by_text.get(text[start : start + length])
                if token is not None and (not token.single_word or _is_apart(text, start, start + length)):
                    return start, token
        return None

    def split(self, text: str) -> list[str | SpecialToken]:
        """Text between control tokens (never empty) and the tokens themselves, in order."""
        parts: list[str | SpecialToken] = []
        at = 0
        while (found := self.find(text, at)) is not None:
            start, token = found
            between = text[at:start]
            if token.lstrip:
                between = between.rstrip()
            if between:
                parts.append(between)
            parts.append(token)
            at = start + len(token.text)
            if token.rstrip:
                at = len(text) - len(text[at:].lstrip())
        if at < len(text):
            parts.append(text[at:])
        return parts


def _is_apart(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return not re.match(r"\w", before) and not re.match(r"\w", after)
