"""Receipts: what they say is what happened, and they add up to the counters."""

from __future__ import annotations

import json
import queue
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.eviction import Evicted
from octavo.cache.ghosts import WHAT_IF, Ghosts
from octavo.cache.radix import Node, PrefixIdentity
from octavo.cache.receipt import Receipt
from octavo.config import CachePolicy, EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.messages import Event, Finished, GenerateRequest, SamplingParams
from octavo.engine.prompt import prompt_array
from tests.support.tiny import tiny_engine

PAGE = 16
CONFIG = EngineConfig(page_size=PAGE, threads=1, max_num_seqs=4, step_tokens=64, policy=CachePolicy("int8", "int8"))
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def ask(engine: Engine, *prompts: list[int], params: SamplingParams = GREEDY, **fields: Any) -> list[Receipt]:
    """Receipts in the order of the prompts, which are asked at once."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    ask.n = getattr(ask, "n", 0) + 1  # type: ignore[attr-defined]
    names = [f"{ask.n}-{i}" for i in range(len(prompts))]  # type: ignore[attr-defined]
    for name, prompt in zip(names, prompts, strict=True):
        engine.submit(GenerateRequest(name, prompt_array(prompt), params, **fields), events.put)
    receipts: dict[str, Receipt] = {}
    while len(receipts) < len(prompts):
        event = events.get(timeout=30)
        if isinstance(event, Finished):
            receipts[event.request_id] = event.receipt
            assert event.cached_tokens == event.receipt.hit_tokens
            assert event.kv_bytes == event.receipt.peak_bytes
    return [receipts[name] for name in names]


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


@pytest.fixture
def engine() -> Any:
    engine = tiny_engine(CONFIG)
    yield engine
    engine.close()


def why(receipt: Receipt) -> tuple[str, int] | None:
    return None if receipt.miss is None else (receipt.miss.reason, receipt.miss.at_token)


def test_cold_then_whole(engine: Engine) -> None:
    cold, warm = (ask(engine, text(50))[0] for _ in range(2))
    assert (cold.hit_tokens, cold.computed_tokens, why(cold)) == (0, 50, ("cold", 0))
    assert (warm.hit_tokens, warm.computed_tokens, why(warm)) == (48, 2, None)
    assert warm.hit_tiers == {"memory": 48, "disk": 0, "peer": 0}
    assert warm.exact
    assert (warm.holdings.shared, warm.holdings.private, warm.holdings.open) == (3, 0, 1)
    assert sum(warm.holdings.by_form.values()) == warm.holdings.n_bytes == warm.peak_bytes
    assert set(warm.holdings.by_form) == {"int8", "open"}


def test_where_two_prompts_part(engine: Engine) -> None:
    """A shared prefix of P - 1 and of P tokens: the receipt names the token, and shows both sides."""
    first = text(60)
    ask(engine, first)
    for shared in (PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1):
        other = [*first[:shared], (first[shared] + 1) % 256, *text(30, seed=shared)]
        (receipt,) = ask(engine, other)
        assert receipt.hit_tokens == shared // PAGE * PAGE
        assert why(receipt) == ("diverged", shared)
        assert receipt.miss is not None
        start = shared - len(range(max(shared - 6, 0), shared))
        assert receipt.miss.got == tuple(other[start : shared + 10])
        assert receipt.miss.expected[: shared - start] == tuple(first[start:shared])
        assert receipt.miss.expected[shared - start] == first[shared]


def test_what_goes_on_is_cold_and_what_is_short_is_short(engine: Engine) -> None:
    first = text(64)
    ask(engine, first)
    (longer,) = ask(engine, [*first, *text(64, 1)])
    # The fourth page was published too; its first answer's page was not full.
    assert (longer.hit_tokens, why(longer)) == (64, ("cold", 64))
    (short,) = ask(engine, text(PAGE, 2))
    assert why(short) == ("too_short", 0)
    (unlike,) = ask(engine, [(t + 1) % 256 for t in first])
    assert why(unlike) == ("cold", 0)


def test_another_salt_or_tenant_shows_nothing_of_the_first(engine: Engine) -> None:
    first = text(60)
    ask(engine, first, tenant="a", cache_salt="x")
    other = [*first[:20], (first[20] + 1) % 256, *text(30)]
    for fields in ({"tenant": "b", "cache_salt": "x"}, {"tenant": "a", "cache_salt": "y"}, {"tenant": "ax"}, {}):
        (receipt,) = ask(engine, other, **fields)
        assert why(receipt) == ("cold", 0)
        assert receipt.miss is not None
        assert receipt.miss.expected == receipt.miss.got == ()


def test_disabled() -> None:
    engine = tiny_engine(replace(CONFIG, policy=CachePolicy("int8", "int8", prefix_cache=False)))
    assert [why(r) for r in (*ask(engine, text(50)), *ask(engine, text(50)))] == [("disabled", 0)] * 2
    engine.close()
    engine = tiny_engine(CONFIG)
    (scored,) = ask(engine, text(50), params=replace(GREEDY, prompt_logprobs=1))
    assert why(scored) == ("disabled", 0)
    engine.close()


def test_what_was_evicted_says_so_and_who_evicted_it() -> None:
    engine = tiny_engine(CONFIG, n_frames=4)
    first = text(60)
    ask(engine, first)
    notes = []
    for seed in range(1, 12):
        (receipt,) = ask(engine, text(120, seed))
        notes += receipt.evictions
    (again,) = ask(engine, first)
    assert again.hit_tokens < 48
    assert why(again) == ("evicted", again.hit_tokens)
    assert {note.policy for note in notes} == {"lru"}
    stats = engine.stats()
    own = sum(note.tokens for note in again.evictions)
    assert sum(note.tokens for note in notes) + own == stats.evicted_pages * PAGE
    engine.close()


prompts = st.tuples(st.integers(0, 2), st.integers(1, 100))


@settings(max_examples=25, deadline=None)
@given(batches=st.lists(st.lists(prompts, min_size=1, max_size=4), min_size=1, max_size=6), n_frames=st.integers(4, 9))
def test_sums_over_receipts_are_the_counters(batches: list[list[tuple[int, int]]], n_frames: int) -> None:
    engine = tiny_engine(CONFIG, n_frames=n_frames)
    texts = [text(100, seed) for seed in range(2)]
    texts.append([*texts[0][:40], *text(60, 9)])
    receipts = [r for batch in batches for r in ask(engine, *[texts[which][:n] for which, n in batch])]
    engine.call(lambda: None, timeout_s=10)  # figures are taken after a step
    engine.call(lambda: None, timeout_s=10)
    stats = engine.stats()
    assert sum(r.hit_tokens for r in receipts) == stats.hit_tokens
    assert sum(r.hit_tokens + r.computed_tokens for r in receipts) == stats.prompt_tokens == stats.query_tokens
    assert sum(r.preemptions for r in receipts) == stats.preemptions
    assert sum(n.tokens for r in receipts for n in r.evictions) == stats.evicted_pages * PAGE
    misses: dict[str, int] = {}
    for r in receipts:
        if r.miss is not None:
            misses[r.miss.reason] = misses.get(r.miss.reason, 0) + 1
    assert dict(stats.misses) == misses
    report = engine.cache_report()
    assert sum(sum(bins) for bins in report.hit_fractions.values()) == len(receipts)
    engine.close()


def test_more_memory_is_what_the_curve_says() -> None:
    """A cyclic scan of 1.5 times the memory: with today's no hit, with twice that nearly all."""
    rates = {}
    for n_frames in (6, 12):
        engine = tiny_engine(CONFIG, n_frames=n_frames)
        per_frame = engine._cache.footprint.per_frame(engine._cache.classes.sealed(0, "int8"))
        n_prompts = int(1.5 * 5 * per_frame * PAGE / 64) + 1
        for _ in range(4):
            for seed in range(n_prompts):
                ask(engine, text(65, seed), params=replace(GREEDY, max_tokens=1))
        report = engine.cache_report()
        rates[n_frames] = dict(report.what_if)
        engine.close()
    assert rates[6][1.0] < 0.1
    assert rates[12][1.0] > 0.6, "with twice the memory the scan fits"
    assert rates[6][2.0] == pytest.approx(rates[12][1.0], abs=0.1), "which the small engine had foretold"
    curve = [rates[6][m] for m in WHAT_IF]
    assert curve == sorted(curve)


IDENTITY = PrefixIdentity(("f",), "", "int8", "all", "tenant", "salt")


def node(key: bytes, parent: Node | None = None, identity: PrefixIdentity = IDENTITY) -> Node:
    return Node(key, 0 if parent is None else parent.depth + 1, parent, identity, [None])


def test_ghosts_are_keyed_by_everything_and_hold_no_tokens() -> None:
    ghosts = Ghosts(100, 1000, PAGE, 10_000)
    pages = [bytes([i]) * 4 * PAGE for i in range(3)]
    top = node(pages[0])
    ghosts.evicted(Evicted(node(pages[1], top), 0, "evicted"))
    ghosts.evicted(Evicted(top, 0, "expired"))
    assert ghosts.look(IDENTITY, None, pages) == "expired"
    assert ghosts.look(IDENTITY, node(pages[0]), pages[1:]) == "evicted"
    assert ghosts.look(IDENTITY, None, pages[1:]) is None, "the whole path counts"
    for field in ("adapter", "stored_form", "reading_policy", "tenant", "salt"):
        assert ghosts.look(IDENTITY._replace(**{field: "other"}), None, pages) is None
    assert ghosts.look(IDENTITY._replace(tenant="tenants", salt="alt"), None, pages) is None
    held = repr(list(ghosts._gone.items())).encode()
    assert not any(page[:8] in held for page in pages)
    ghosts.forget_tenant("tenant")
    assert ghosts.look(IDENTITY, None, pages) is None, "a destroyed key finds nothing"


def test_the_ghost_list_is_bounded() -> None:
    ghosts = Ghosts(10, 1000, PAGE, 10_000)
    for i in range(100):
        ghosts.evicted(Evicted(node(i.to_bytes(64, "little")), 0, "evicted"))
    assert len(ghosts) == 10
    assert ghosts.look(IDENTITY, None, [(99).to_bytes(64, "little")]) == "evicted"
    assert ghosts.look(IDENTITY, None, [(9).to_bytes(64, "little")]) is None


def test_ghost_names_of_a_long_path_are_not_recursive() -> None:
    ghosts = Ghosts(10, 1000, PAGE, 10_000)
    deep = None
    for i in range(5000):
        deep = node(i.to_bytes(64, "little"), deep)
    assert deep is not None
    ghosts.evicted(Evicted(deep, 0, "evicted"))
    assert len(ghosts) == 1


def test_identities_are_encoded_injectively() -> None:
    one = PrefixIdentity(("a", "b"), "", "", "", "ab", "c")
    other = PrefixIdentity(("a", "b"), "", "", "", "a", "bc")
    assert json.dumps(one) != json.dumps(other)
    assert json.dumps(one._replace(fingerprint=("a,", "b"))) != json.dumps(one._replace(fingerprint=("a", ",b")))
