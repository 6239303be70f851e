"""The tokenizer of a model, on the `tokenizers` library.

Control tokens are kept out of the library's tokenizer and split off here instead, so that reading them or not
is a choice per call (the library's switch is a setting of the whole tokenizer, not safe between threads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as PlainTokenizer

from octavo.errors import RequestError
from octavo.text.chat_template import ChatTemplate, ControlGuard, prepare_messages
from octavo.text.special import SpecialToken, SpecialTokens
from octavo.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a loader found; `FastTokenizer` is built from it.

    Attributes:
        plain: splits text that holds no control tokens. Tokens that the original always reads, such as
            "<tool_call>", are among its added tokens; control tokens are not.
        inner: the same for text after a control token, where that differs (SentencePiece's leading space).
        prefix, suffix: ids that `encode(add_special=True)` puts around a text.
        renumbered: ids of `plain` and `inner` that differ from the model's, which they map to.
        template: the chat template, and `tool_template` one that replaces it when tools are given.
        strip_space: whether the first token's leading space is an artefact that `decode` removes.
    """

    vocabulary: Vocabulary
    specials: tuple[SpecialToken, ...]
    plain: PlainTokenizer
    inner: PlainTokenizer
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    renumbered: Mapping[int, int] = field(default_factory=dict)
    strip_space: bool = False
    template: ChatTemplate | None = None
    tool_template: ChatTemplate | None = None


class FastTokenizer:
    """Implements `octavo.text.tokenizer.Tokenizer`."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._vocabulary = parts.vocabulary
        self._specials = SpecialTokens(parts.specials)
        self.vocab_size = len(parts.vocabulary)
        self.eos_token_ids = parts.eos_token_ids
        self.bos_token_id = parts.bos_token_id
        self.has_chat_template = parts.template is not None
        self._guard = ControlGuard(token.text for token in parts.specials)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        ids = list(self._parts.prefix) if add_special else []
        ids += self._encode_parts(self._specials.split(text) if parse_special else [text])
        return [*ids, *self._parts.suffix] if add_special else ids

    def _encode_parts(self, parts: Sequence[str | SpecialToken]) -> list[int]:
        texts = [part for part in parts if isinstance(part, str)]
        at_start = bool(parts) and isinstance(parts[0], str)
        encoded = _encode_plain(self._parts.plain, texts[:1]) if at_start else []
        encoded += _encode_plain(self._parts.inner, texts[len(encoded) :])
        renumbered = self._parts.renumbered
        following = iter(encoded)
        ids: list[int] = []
        for part in parts:
            if isinstance(part, SpecialToken):
                ids.append(part.id)
            else:
                found = next(following)
                ids += [renumbered.get(i, i) for i in found] if renumbered else found
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD. Raises RequestError for an id outside the vocabulary."""
        vocabulary = self._vocabulary
        chunks = [vocabulary.token_bytes(i) or self._control_bytes(i, skip_special) for i in token_ids]
        text = b"".join(chunks).decode("utf-8", errors="replace")
        return text[1:] if self._parts.strip_space and text.startswith(" ") else text

    def _control_bytes(self, token_id: int, skip_special: bool) -> bytes:
        return b"" if skip_special else self._vocabulary.control_text(token_id).encode("utf-8")

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary.token_bytes(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        parts, marker = self._render(messages, tools, add_generation_prompt)
        texts = (part if isinstance(part, SpecialToken) else part.replace(marker, "") for part in parts)
        return self._encode_parts([text for text in texts if text])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, for people to read: which control tokens in it are real, only the ids say."""
        parts, marker = self._render(messages, tools, add_generation_prompt)
        return "".join(part.text if isinstance(part, SpecialToken) else part for part in parts).replace(marker, "")

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, generate: bool
    ) -> tuple[list[str | SpecialToken], str]:
        """The rendered prompt split at control tokens, its text still holding the guard's marker."""
        template = (self._parts.tool_template if tools else None) or self._parts.template
        if template is None:
            raise RequestError(
                "this model has no chat template; use plain completions or a model that is tuned for chat",
                param="messages",
            )
        prepared = prepare_messages(messages)
        for i, message in enumerate(prepared):
            self._guard.check_role(message["role"], f"messages[{i}].role")
        try:
            marker = self._guard.marker_for([prepared, tools or (), template.source])
            guarded = self._guard.guard(prepared, marker)
            guarded_tools = None if tools is None else self._guard.guard(tools, marker)
        except RecursionError as error:
            raise RequestError("messages or tools are nested too deeply", param="messages") from error
        rendered = template.render(guarded, guarded_tools, add_generation_prompt=generate)
        return self._specials.split(rendered), marker


def _encode_plain(tokenizer: PlainTokenizer, texts: list[str]) -> list[list[int]]:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds half of a surrogate pair at character {error.start}: it is not valid Unicode"
            ) from error
    # The batch call without offsets takes half the time of `encode`, and lets other threads run meanwhile.
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
