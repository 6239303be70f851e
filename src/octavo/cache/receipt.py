"""Receipts: what the cache did for one request, in numbers that add up to the counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MissReason = Literal[
    "cold", "diverged", "too_short", "expired", "evicted", "erased", "other_policy", "other_build", "disabled"
]


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prefix hit ended before the prompt did.

    cold: nothing that goes on so was cached. diverged: what is cached goes on with other tokens. too_short: the prompt
    has no whole page before its last token. expired, evicted, erased: it was cached and is gone. other_policy,
    other_build: it is cached in another form, or by other arithmetic. disabled: this request or this server does not
    look.

    Attributes:
        at_token: the first token that was not served; of "diverged" the first that differs.
        expected, got: of "diverged", token ids around the first difference in what is cached (of the same tenant and
            salt) and in the prompt.
    """

    reason: MissReason
    at_token: int
    expected: tuple[int, ...] = ()
    got: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Holdings:
    """Distinct pages that a request's block tables hold, and their bytes.

    Attributes:
        shared: sealed pages that the prefix tree offers to others. private: sealed pages that it does not. open: pages
            being written.
        by_form: bytes by the form's name.
    """

    shared: int = 0
    private: int = 0
    open: int = 0
    by_form: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return sum(self.by_form.values())


@dataclass(frozen=True, slots=True)
class EvictionNote:
    """Cached tokens of others that went to make room for the request."""

    reason: Literal["pressure"]
    tokens: int
    policy: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the cache did for a request, told when it is over.

    Attributes:
        hit_tokens + computed_tokens: the prompt; 0 for a request that never started. What is computed again after a
            preemption does not count.
        pruned_tokens: tokens forgotten on purpose. exact: whether every token saw what the visibility rule says.
        hit_tiers: hit_tokens by where their pages were.
        holdings: at the end of its last choice. peak_bytes: the most at the end of any.
        policy: the sealed form of its pages.
        expires_at: when what it published expires unless it is used again, in seconds since 1970; None for never.
    """

    hit_tokens: int
    computed_tokens: int
    pruned_tokens: int
    exact: bool
    hit_tiers: Mapping[str, int]
    miss: Miss | None
    holdings: Holdings
    peak_bytes: int
    evictions: tuple[EvictionNote, ...]
    preemptions: int
    expires_at: float | None
    pool: str
    policy: str


@dataclass(slots=True)
class ReceiptTotals:
    """Sums over all receipts that were issued.

    Attributes:
        hit_fractions: for each tenant, requests by the share of the prompt that hit: none, up to 10 %, 20 % ... 100 %.
    """

    requests: int = 0
    prompt_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_tokens: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    hit_fractions: dict[str, list[int]] = field(default_factory=dict)

    def add(self, receipt: Receipt, tenant: str) -> None:
        prompt = receipt.hit_tokens + receipt.computed_tokens
        if prompt == 0:
            return
        self.requests += 1
        self.prompt_tokens += prompt
        self.hit_tokens += receipt.hit_tokens
        self.evicted_tokens += sum(note.tokens for note in receipt.evictions)
        if receipt.miss is None or receipt.miss.reason != "disabled":
            self.query_tokens += prompt
        if receipt.miss is not None:
            self.misses[receipt.miss.reason] = self.misses.get(receipt.miss.reason, 0) + 1
        bins = self.hit_fractions.setdefault(tenant, [0] * 11)
        bins[-(-10 * receipt.hit_tokens // prompt)] += 1
