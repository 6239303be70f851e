"""Token ids to text and back, from a GGUF's own metadata or Hugging Face files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Thread-safe.

    Attributes:
        vocab_size: ids are 0 .. vocab_size - 1.
        eos_token_ids: tokens that end a turn or a text (end-of-sequence, end-of-turn).
        bos_token_id: prepended by `encode(add_special=True)` where the model wants one, else None.
        has_chat_template: whether `apply_chat_template` works.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    has_chat_template: bool

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Text -> ids. `parse_special` reads "<|im_start|>" and the like as control tokens; otherwise they
        are plain text, so that a user's message cannot forge a turn."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for (b"" for control tokens): the basis of incremental detokenization."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Messages in OpenAI's shape -> prompt ids. Raises RequestError (param "messages") on what the
        template refuses."""
        ...
