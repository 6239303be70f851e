"""How everything outside the engine's thread talks to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.engine.messages import GenerateRequest, Sink
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves and within which limits. Fixed while it runs."""

    model_name: str
    model_path: str
    backend: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    page_size: int
    key_codec: str
    value_codec: str
    bytes_per_token: float
    kv_memory_bytes: int
    prefix_cache: bool


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, consistent in itself: page counts obey free + cached + active == total per class.

    "cached" pages are in the prefix tree and held by no sequence; "active" are held by at least one.
    Counters only grow. `prompt_tokens` are those of admitted requests, each request once; `query_tokens` and
    `hit_tokens` are the ones looked up and found in the prefix tree.
    """

    requests_running: int
    requests_waiting: int
    sealed_pages_active: int
    sealed_pages_cached: int
    sealed_pages_free: int
    open_pages_active: int
    open_pages_free: int
    frames_total: int
    frames_free: int
    frame_bytes: int
    kv_used_bytes: int
    kv_total_bytes: int
    hit_tokens: int
    query_tokens: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    evicted_pages: int
    steps: int


class EngineClient(Protocol):
    """Thread-safe. `engine.engine.Engine` implements it; tests of the API may use a scripted one."""

    info: EngineInfo
    tokenizer: Tokenizer

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request. Raises RequestError at once for what can never be served (too long, unknown token id,
        beyond the page budget) and OverloadedError when the queue is full. Afterwards events go to `sink` until
        Finished or Failed."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request at any stage and free its pages; its choices end with finish_reason "cancelled". A request
        that is unknown or over is ignored."""
        ...

    def stats(self) -> EngineStats: ...

    def page_map(self) -> list[dict[str, object]]:
        """For the page at "/": every frame as {"class", "pages": [state of each slot]}, state one of
        "free", "open", "active", "shared", "cached"."""
        ...

    def is_healthy(self) -> bool:
        """False once the engine's thread has died; the reason is in its log."""
        ...

    def close(self) -> None:
        """Fail what is in flight and give the memory back. Raises CloseTimeout when that takes too long."""
        ...
