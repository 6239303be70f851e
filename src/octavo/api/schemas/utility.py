"""The bodies of POST /tokenize and POST /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from octavo.api.schemas.chat import Message, Tool
from octavo.api.schemas.common import RequestModel


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
