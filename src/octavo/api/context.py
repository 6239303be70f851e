"""What every route needs: the engine, the settings, the metrics, and the requests in flight."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypedDict

from starlette.requests import Request

from octavo.api.body import Model, read_body
from octavo.api.contract import Contract
from octavo.api.dashboard.feed import CacheFeed
from octavo.api.errors import model_not_found
from octavo.api.generation import Generations
from octavo.api.metrics import Metrics
from octavo.api.receipts import ReceiptJson, ReceiptStore
from octavo.api.settings import ServerSettings
from octavo.engine.client import EngineClient, EngineInfo
from octavo.engine.messages import Finished


@dataclass(frozen=True, slots=True)
class ServerContext:
    engine: EngineClient
    settings: ServerSettings
    contract: Contract
    model_names: tuple[str, ...]
    metrics: Metrics
    generations: Generations
    feed: CacheFeed
    receipts: ReceiptStore
    system_fingerprint: str
    created: int

    async def read(self, request: Request, model: type[Model]) -> Model:
        settings = self.settings
        return await read_body(request, model, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)

    def issue_receipt(self, tenant: str, request_id: str, finished: list[Finished]) -> ReceiptJson:
        """The `cache` object of an answer, at today's prices; a copy without text is kept for the tenant."""
        prices = self.contract.now.policy.prices
        return self.receipts.issue(tenant, request_id, finished, self.engine.tokenizer, prices)

    def check_model(self, name: str) -> None:
        """Raises ApiError (404, model_not_found)."""
        if name not in self.model_names:
            raise model_not_found(name, self.model_names)


def context_of(request: Request) -> ServerContext:
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


def system_fingerprint(info: EngineInfo, version: str) -> str:
    """Changes with whatever may change the numbers: version, model, backend, page size and codecs."""
    parts = (version, info.model_name, info.backend, info.page_size, info.key_codec, info.value_codec)
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """OpenAI's fields, and DeepSeek's for the same numbers: hits and misses add up to prompt_tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int


def usage_of(finished: list[Finished]) -> Usage:
    """Usage of one HTTP request, summed over its prompts. A prompt counts once, however many choices share
    it."""
    prompt = sum(f.prompt_tokens for f in finished)
    cached = sum(f.cached_tokens for f in finished)
    completion = sum(f.completion_tokens for f in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }
