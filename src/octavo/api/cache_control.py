"""What a request asks the cache to keep, in tokens, and what its answer says about it in Anthropic's fields."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypedDict

from octavo.engine.client import EngineClient
from octavo.engine.messages import GenerateRequest
from octavo.errors import RequestError

log = logging.getLogger("octavo.api")

#: Anthropic's lifetimes, in seconds.
TTL_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The first `token_index` tokens of the prompt are to be kept for `ttl_s` seconds after their last use."""

    token_index: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class CacheControl:
    """What a request asked for, in the order of its blocks."""

    breakpoints: tuple[Breakpoint, ...] = ()


class CacheCreation(TypedDict):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessagesUsage(TypedDict):
    """input_tokens, cache_creation_input_tokens and cache_read_input_tokens add up to the prompt's tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int


def messages_usage(
    control: CacheControl, *, page_size: int, prompt_tokens: int, cached_tokens: int, output_tokens: int
) -> MessagesUsage:
    """Tokens that were computed and lie before a breakpoint, in whole pages, are created; those before the last one of
    an hour for an hour, those between it and the last of five minutes for five minutes."""

    def last_page_end(ttl: str) -> int:
        ends = [b.token_index // page_size * page_size for b in control.breakpoints if b.ttl_s == TTL_S[ttl]]
        return max(ends, default=0)

    hour_end = max(last_page_end("1h"), cached_tokens)
    minutes_end = max(last_page_end("5m"), hour_end)
    return {
        "input_tokens": prompt_tokens - minutes_end,
        "cache_creation_input_tokens": minutes_end - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": minutes_end - hour_end,
            "ephemeral_1h_input_tokens": hour_end - cached_tokens,
        },
        "output_tokens": output_tokens,
    }


def pin_prefixes(engine: EngineClient, request: GenerateRequest, control: CacheControl) -> None:
    """Pin the whole pages before each breakpoint for its `ttl_s`, when the answer is complete. May wait for the step in
    progress. Where pins hold what they may already, the pages stay as any: least recently used first."""
    for point in control.breakpoints:
        prefix = request.prompt_token_ids[: point.token_index]
        try:
            engine.pin(request.tenant, request.cache_salt, prefix, point.ttl_s)
        except RequestError as error:
            log.info("a marked prefix of %d tokens is not pinned: %s", point.token_index, error)
