"""The bodies of small routes: POST /tokenize and /detokenize, in vLLM's shapes, and POST /v1/cache/pins."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from octavo.api.errors import invalid
from octavo.api.schemas.chat import Message, Tool
from octavo.api.schemas.common import RequestModel
from octavo.api.schemas.completions import Prompt


class TokenizeRequest(RequestModel):
    """Either `prompt`, read as /v1/completions reads it, or `messages`, read as /v1/chat/completions reads
    them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.tools else None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[int]


#: Pins last a day at most; who wants more pins again.
MAX_PIN_S = 86_400


class PinRequest(RequestModel):
    """The body of POST /v1/cache/pins. `ttl`: seconds, or "90s", "5m", "1h"."""

    model: str
    prompt: Prompt
    ttl: str | int = "5m"

    def ttl_s(self) -> float:
        """Raises ApiError."""
        found = re.fullmatch(r"(\d{1,9})([smh]?)", str(self.ttl))
        seconds = int(found.group(1)) * {"": 1, "s": 1, "m": 60, "h": 3600}[found.group(2)] if found else 0
        if not 1 <= seconds <= MAX_PIN_S:
            raise invalid(f"ttl must be from 1s to {MAX_PIN_S}s, such as 90s, 5m or 1h; got {self.ttl!r}", param="ttl")
        return float(seconds)
