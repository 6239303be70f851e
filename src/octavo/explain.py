"""Receipts in words: what the cache did for a request, why it missed, and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Cause = Literal["timestamp", "identifier", "json_keys"]

_ADVICE: dict[Cause, str] = {
    "timestamp": "The two differ in digits, as times and dates do. Put what changes from request to request at the end "
    "of the prompt, or round it to the day.",
    "identifier": "The two differ in what looks like an identifier. Put identifiers behind the stable content.",
    "json_keys": "The two differ in JSON keys, or in their order. Write keys in one order (json.dumps(..., "
    "sort_keys=True)), and keep the list of tools in one order.",
}


def likely_cause(expected: str | None, got: str | None) -> Cause | None:
    """What usually makes two texts part as these do; None where nothing usual shows."""
    if not expected or not got:
        return None
    same = _common(expected, got)
    a, b = expected[same:], got[same:]
    # What a difference in the middle of a number or word belongs to begins before it.
    head = re.search(r"[\w:.+-]*$", expected[:same])
    word = head.group() if head else ""
    one, other = word + _word(a), word + _word(b)
    if re.search(r"\d", one + other) and re.fullmatch(r"[\d:.,TZ/+ -]*", one + other):
        return "timestamp"
    if re.fullmatch(r"[0-9a-fA-F-]{6,}", one) and re.fullmatch(r"[0-9a-fA-F-]{6,}", other):
        return "identifier"
    keys = re.compile(r'"?[\w-]+"\s*:')
    if keys.search(a) and keys.search(b):
        return "json_keys"
    return None


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _word(text: str) -> str:
    match = re.match(r"[\w:.+-]*", text)
    return match.group() if match else ""


def explain(receipt: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about a receipt as `GET /v1/cache/receipts/ID` gives it."""
    hit, computed = receipt["hit_tokens"], receipt["computed_tokens"]
    prompt = hit + computed
    if prompt == 0:
        yield "The request never started, so the cache did nothing for it."
        return
    share = f"{hit:,} ({hit / prompt:.0%})"
    yield f"Of {prompt:,} prompt tokens {share} were served from the cache, {computed:,} were computed."
    miss = receipt["miss"]
    if miss is None:
        yield "That is all that a cache can serve: the tokens after the last whole page are always computed."
    else:
        yield from _explain_miss(miss)
    for note in receipt["evictions"]:
        yield f"To make room for it, {note['tokens']:,} cached tokens went ({note['reason']}, policy {note['policy']})."
    if receipt["preemptions"]:
        yield (
            f"It was preempted {receipt['preemptions']} time(s) for want of pages and computed again, to the same "
            "answer. More --kv-memory, fewer sequences at once, or a smaller codec would avoid that."
        )
    size = receipt["bytes"]
    forms = ", ".join(f"{n / 2**20:,.1f} MiB {form}" for form, n in size["by_codec"].items())
    yield f"It held {size['peak'] / 2**20:,.1f} MiB of pages at most ({forms} at its end)."
    if not receipt["exact"]:
        yield "Some tokens saw less than the whole context exactly, as its policy allows."


def _explain_miss(miss: Mapping[str, Any]) -> Iterator[str]:
    at = miss["at_token"]
    reason = miss["reason"]
    if reason == "diverged":
        yield f"At token {at:,} the prompt goes on otherwise than what is cached."
        cause: Cause | None = miss.get("likely_cause")
        yield _ADVICE[cause] if cause else "Put the content that stays the same first, and what changes after it."
    elif reason == "cold":
        where = "No prompt that begins so was" if at == 0 else f"What follows token {at:,} was never"
        yield f"{where} cached before; the next one will find it."
    elif reason == "too_short":
        yield "The prompt has no whole page before its last token, so there is nothing that could be shared."
    elif reason == "evicted":
        yield f"What follows token {at:,} was cached, but was evicted for want of memory (see /v1/cache/what-if)."
    elif reason == "expired":
        yield f"What follows token {at:,} was cached, but its lifetime was over."
    elif reason == "erased":
        yield f"What follows token {at:,} was cached, but was erased on request."
    elif reason == "other_policy":
        yield "The prompt is cached in another form than this request's policy reads."
    elif reason == "other_build":
        yield "The prompt is cached by another build, model or setting, whose numbers may differ; it is not read."
    else:
        yield "The prefix cache was not used: it is off, or the request asked for log-probabilities of its prompt."
