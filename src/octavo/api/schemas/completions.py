"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from octavo.api.errors import invalid, unsupported
from octavo.api.schemas.common import MAX_TOKENS, REFUSED_EVERYWHERE, Refused, SamplingFields
from octavo.engine.messages import MAX_LOGPROBS

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16

#: One prompt: text, or token ids.
Prompt = str | list[int]

_REFUSED_IN_COMPLETIONS: Mapping[str, Refused] = {
    **REFUSED_EVERYWHERE,
    "suffix": Refused(("",), "filling in the middle is not supported"),
    "response_format": Refused(({"type": "text"},), "constrained decoding is not supported"),
    "prompt_embeds": Refused((), "embedded prompts are not supported"),
}


class CompletionRequest(SamplingFields):
    """`prompt` becomes a list of prompts. Text may hold control tokens such as "<|im_start|>", which are read
    as such."""

    refused: ClassVar[Mapping[str, Refused]] = _REFUSED_IN_COMPLETIONS

    prompt: list[Any]
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_list(cls, value: object) -> list[Prompt]:
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if _is_token_ids(value):
                return [value]
            if all(isinstance(prompt, str) or (prompt and _is_token_ids(prompt)) for prompt in value):
                if len(value) > MAX_PROMPTS:
                    counts = {"limit": MAX_PROMPTS, "count": len(value)}
                    raise PydanticCustomError("prompt", "at most {limit} prompts, got {count}", counts)
                return value
        raise PydanticCustomError(
            "prompt",
            "must be a string, an array of strings, an array of token ids or an array of such arrays, not empty",
        )

    def check(self) -> None:
        """Rules over more than one field. Raises ApiError."""
        self.check_streaming()
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = f"best_of {self.best_of} with n {self.n or 1}: choosing among more choices is not supported"
            raise unsupported(message, param="best_of")

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises ApiError for the first id outside the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return  # without a Python step per token
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            message = f"{param}: token ids are 0 to {vocab_size - 1}, got {token} at position {position}"
            raise invalid(message[:300], param=param)
