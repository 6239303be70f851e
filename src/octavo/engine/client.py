"""How everything outside the engine's thread talks to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.cache.pins import Pin
from octavo.cache.policy import Policy
from octavo.engine.messages import GenerateRequest, Sink
from octavo.text.tokenizer import Tokenizer

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageClassInfo:
    """Pages of one cache group in one form."""

    group: str
    form: str
    is_open: bool
    page_bytes: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves and within which limits. Fixed while it runs."""

    model_name: str
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
    page_classes: tuple[PageClassInfo, ...]


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of one class: every slot of its frames is one of active (held by a sequence), cached (held by the prefix
    tree alone), free."""

    group: str
    form: str
    is_open: bool
    active: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class FrameMap:
    """One frame of the arena: its class (index in `EngineInfo.page_classes`; None: unused), and a letter per slot.

    o(pen), a(ctive: read by one sequence), s(hared by several), c(ached), f(ree).
    """

    page_class: int | None
    states: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, consistent in itself: page counts obey free + cached + active == total per class.

    Counters only grow. `prompt_tokens`, `query_tokens` (of requests that looked into the prefix tree), `hit_tokens` and
    `misses` (requests by reason) are sums over the receipts that were issued, so of requests that are over.
    `cascade_refused`: see `Ops.cascade_refused`.
    """

    requests_running: int
    requests_waiting: int
    pages: tuple[PageCounts, ...]
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
    misses: tuple[tuple[str, int], ...]
    cascade_refused: int
    steps: int

    def pages_active(self, *, is_open: bool) -> int:
        """Over all groups and forms."""
        return sum(p.active for p in self.pages if p.is_open == is_open)

    @property
    def pages_cached(self) -> int:
        return sum(p.cached for p in self.pages)


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """What an erasure did. `pages` and `n_bytes` are unpublished and, but for the pending ones, zeroed; those go when
    the last of the running `requests` that may read them ends. `keys`: keys of ghost fingerprints destroyed."""

    pages: int
    n_bytes: int
    keys: int
    pending: int
    requests: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How well the cache serves, over all receipts issued.

    Attributes:
        what_if: (multiple of today's memory, hit rate it would have had), the first for today's.
        hit_fractions: by tenant, requests by the share of their prompt that hit: none, up to 10 %, ... up to 100 %.
    """

    hit_tokens: int
    query_tokens: int
    what_if: tuple[tuple[float, float], ...]
    hit_fractions: Mapping[str, tuple[int, ...]]


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

    def page_map(self) -> list[FrameMap]:
        """For the page at "/": every frame of the arena, in order. May wait for the step in progress."""
        ...

    def apply_policy(self, policy: Policy) -> None:
        """Lifetimes, floors and caps that hold from now on: pages keep the deadline they were published with, but are
        used under the new time to live; a tenant above its new cap loses cached pages as it asks for more."""
        ...

    def pin(self, tenant: str, salt: str, prompt: I32, ttl_s: float) -> Pin:
        """Keep the cached whole pages of a prompt for so long, whatever the pressure. The same prefix again is the same
        pin. Raises RequestError where nothing of it is cached, or pins hold what they may. May wait for the step in
        progress."""
        ...

    def unpin(self, tenant: str, pin_id: str) -> Pin | None:
        """Let a tenant's pin go; None where it has none of this id."""
        ...

    def erase(self, tenant: str, salt: str | None = None) -> ErasureReport:
        """Unpublish and zero what the cache holds of a tenant, or of one of its salts. May wait for the step in
        progress."""
        ...

    def cache_report(self) -> CacheReport:
        """May wait for the step in progress."""
        ...

    def is_healthy(self) -> bool:
        """False once the engine's thread has died; the reason is in its log."""
        ...

    def close(self) -> None:
        """Fail what is in flight and give the memory back. Raises CloseTimeout when that takes too long."""
        ...
