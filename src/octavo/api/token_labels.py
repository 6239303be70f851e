"""Tokens as log-probabilities show them: a label, bytes, and the place in the text."""

from __future__ import annotations

import codecs
from typing import TypedDict

from octavo.engine.messages import TokenLogprob
from octavo.text.tokenizer import Tokenizer

#: OpenAI's stand-in for minus infinity, which JSON cannot hold.
LOWEST_LOGPROB = -9999.0


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; its name for a control token; "bytes:\\xe2\\x80" where it is part of a character."""
    data = tokenizer.token_bytes(token_id)
    if not data:
        return tokenizer.decode([token_id], skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> list[ChatTokenLogprob]:
    """Entries of logprobs.content. The bytes of all entries, joined, are the text; a control token has
    none."""

    def entry(token_id: int, logprob: float) -> TopLogprob:
        return {
            "token": token_label(tokenizer, token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return [
        {**entry(e.token_id, e.logprob), "top_logprobs": [entry(token, value) for token, value in e.top]}
        for e in entries
    ]


class CompletionLogprobsBuilder:
    """Builds the `logprobs` of one completion choice, in one go or chunk by chunk.

    `text_offset` counts characters of the choice's text before the token; a token that only continues a
    character has that character's offset. `top` False leaves out top_logprobs (logprobs: 0).
    """

    def __init__(self, tokenizer: Tokenizer, *, top: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def build(self, token_ids: list[int], entries: list[TokenLogprob | None]) -> CompletionLogprobs:
        """`entries[i]` is that of `token_ids[i]`; None where nothing predicts the token (the first of a
        prompt)."""
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return {
            "tokens": [token_label(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if e is None else max(e.logprob, LOWEST_LOGPROB) for e in entries],
            "top_logprobs": [None if e is None else self._alternatives(e) for e in entries] if self._top else None,
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Where two share a label the likelier is shown."""
        labels: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            label = token_label(self._tokenizer, token_id)
            labels[label] = max(labels.get(label, LOWEST_LOGPROB), logprob, LOWEST_LOGPROB)
        return labels
