"""Receipts as clients see them: on each answer, and kept for a while without text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from octavo.cache.policy import Prices
from octavo.engine.messages import Finished
from octavo.explain import likely_cause
from octavo.text.tokenizer import Tokenizer

#: The `cache` object of an answer; a list, one for each prompt, where a request had several.
ReceiptJson = dict[str, Any] | list[dict[str, Any]]

#: Receipts that are kept, over all tenants; the oldest go first.
MAX_RECEIPTS = 10_000


def receipt_object(finished: Finished, tokenizer: Tokenizer, prices: Prices | None) -> dict[str, Any]:
    """The `cache` object of an answer."""
    receipt = finished.receipt
    miss = receipt.miss
    held = receipt.holdings
    return {
        "hit_tokens": receipt.hit_tokens,
        "computed_tokens": receipt.computed_tokens,
        "pruned_tokens": receipt.pruned_tokens,
        "exact": receipt.exact,
        "hit_tiers": dict(receipt.hit_tiers),
        "miss": None
        if miss is None
        else {
            "reason": miss.reason,
            "at_token": miss.at_token,
            "expected": _text(miss.expected, tokenizer),
            "got": _text(miss.got, tokenizer),
        },
        "pages": {"shared": held.shared, "private": held.private, "open": held.open},
        "bytes": {
            "resident": held.n_bytes,
            "peak": receipt.peak_bytes,
            "by_codec": dict(held.by_form),
            "by_tier": {"memory": held.n_bytes, "disk": 0},
        },
        "evictions": [{"reason": e.reason, "tokens": e.tokens, "policy": e.policy} for e in receipt.evictions],
        "preemptions": receipt.preemptions,
        "expires_at": receipt.expires_at,
        "pool": receipt.pool,
        "policy": receipt.policy,
        "cost": None if prices is None else _cost(finished, prices),
    }


def _cost(finished: Finished, prices: Prices) -> dict[str, str]:
    """Amounts as decimal strings: they are exact."""

    def amount(tokens: int, per_million: Decimal) -> str:
        return f"{(tokens * per_million).scaleb(-6):f}"

    return {
        "currency": prices.currency,
        "cached": amount(finished.receipt.hit_tokens, prices.cached),
        "computed": amount(finished.receipt.computed_tokens, prices.computed),
        "output": amount(finished.completion_tokens, prices.output),
    }


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str | None:
    return tokenizer.decode(list(tokens), skip_special=False) if tokens else None


class ReceiptStore:
    """Receipts of the last requests, by tenant and request id. They keep positions and causes, no text."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], list[dict[str, Any]]] = OrderedDict()

    def issue(
        self,
        tenant: str,
        request_id: str,
        finished: Sequence[Finished],
        tokenizer: Tokenizer,
        prices: Prices | None,
    ) -> ReceiptJson:
        """The receipt of a request, to be sent with its answer; one for each prompt where there are several."""
        issued = [receipt_object(one, tokenizer, prices) for one in finished]
        self._kept[tenant, request_id] = [_without_text(receipt) for receipt in issued]
        while len(self._kept) > MAX_RECEIPTS:
            self._kept.popitem(last=False)
        return issued[0] if len(issued) == 1 else issued

    def find(self, tenant: str, request_id: str) -> list[dict[str, Any]] | None:
        return self._kept.get((tenant, request_id))

    def erase(self, tenant: str) -> int:
        """Drop a tenant's receipts; how many there were."""
        keys = [key for key in self._kept if key[0] == tenant]
        for key in keys:
            del self._kept[key]
        return len(keys)


def _without_text(receipt: dict[str, Any]) -> dict[str, Any]:
    miss = receipt["miss"]
    if miss is None:
        return receipt
    cause = likely_cause(miss["expected"], miss["got"])
    return {**receipt, "miss": {"reason": miss["reason"], "at_token": miss["at_token"], "likely_cause": cause}}
