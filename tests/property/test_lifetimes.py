"""How long pages live, and what an erasure leaves."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.cache import integrity
from octavo.cache.classes import PageClasses
from octavo.cache.footprint import Footprint
from octavo.cache.format import Form
from octavo.cache.lifetime import Lifetime
from octavo.cache.manager import KVCache
from octavo.cache.pins import Pins
from octavo.cache.radix import PrefixIdentity
from octavo.cache.spec import CacheSpec, FullGroup
from octavo.config import CachePolicy, EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.messages import Delta, Event, Finished, GenerateRequest, SamplingParams
from octavo.engine.prompt import prompt_array
from octavo.errors import ConfigError, RequestError
from octavo.ops.host_store import HostStore, host_memory
from tests.property.test_receipts import ask, text, why
from tests.support.tiny import tiny_engine

PAGE = 16
IDENTITY = PrefixIdentity(("test",), "", "int8", "all", "t", "")
CONFIG = EngineConfig(page_size=PAGE, threads=1, max_num_seqs=4, step_tokens=64)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class World:
    """A cache with a clock of its own."""

    def __init__(self, **lifetime: float) -> None:
        self.now = 100.0
        sizes = Footprint(PageClasses(CacheSpec((FullGroup((0,), 1, 8),)), PAGE, [Form("int8", "int8")]), 4096, 40)
        store = HostStore(sizes.arena_bytes)
        self.cache = KVCache(sizes, store, lifetime=Lifetime(**lifetime), clock=lambda: self.now)

    def serve(self, tokens: list[int]) -> int:
        """A request over these tokens; how many hit."""
        array = np.array(tokens, dtype=np.int32)
        table = self.cache.new_table(IDENTITY)
        hit = self.cache.match_prefix(table, array, len(tokens)).n_tokens
        if hit < len(tokens):
            self.cache.reserve(table, len(tokens) - hit)
            self.cache.commit(table, array, len(tokens) - hit)
        self.cache.release(table)
        assert integrity.check(self.cache) == []
        return hit

    def expire(self) -> None:
        while self.cache.expire():
            assert integrity.check(self.cache) == []


def test_a_hit_refreshes_the_time_to_live() -> None:
    world = World(ttl_s=10)
    tokens = list(range(3 * PAGE))
    assert world.serve(tokens) == 0
    for _ in range(5):
        world.now += 9
        assert world.serve(tokens) == 3 * PAGE
    world.now += 10
    assert world.serve(tokens) == 0, "10 s after its last hit it has expired"
    assert world.serve(tokens) == 3 * PAGE


def test_a_hit_on_a_prefix_refreshes_the_prefix_alone() -> None:
    world = World(ttl_s=10)
    tokens = list(range(3 * PAGE))
    world.serve(tokens)
    world.now += 6
    assert world.serve(tokens[:PAGE]) == PAGE
    world.now += 6
    match = world.cache.find_prefix(IDENTITY, np.array(tokens, dtype=np.int32), 3 * PAGE)
    assert (match.n_tokens, match.end.reason) == (PAGE, "expired")


def test_a_parent_lives_as_long_as_its_children() -> None:
    world = World(ttl_s=10)
    tokens = list(range(2 * PAGE))
    world.serve(tokens)
    world.now += 8
    assert world.serve([*tokens, *range(PAGE)]) == 2 * PAGE
    world.now += 8
    world.expire()
    assert world.serve([*tokens, *range(PAGE)]) == 3 * PAGE


def test_the_greatest_age_is_never_refreshed() -> None:
    world = World(ttl_s=10, max_age_s=25)
    tokens = list(range(2 * PAGE))
    world.serve(tokens)
    for _ in range(3):
        world.now += 8
        assert world.serve(tokens) == 2 * PAGE
    world.now += 1
    assert world.serve(tokens) == 0, "25 s after it was computed"
    assert world.serve(tokens) == 2 * PAGE, "and it is computed and published anew"


def test_what_is_behind_a_page_cannot_outlive_it() -> None:
    world = World(max_age_s=25)
    tokens = list(range(2 * PAGE))
    world.serve(tokens)
    world.now += 20
    assert world.serve([*tokens, *range(PAGE)]) == 2 * PAGE
    world.now += 5
    assert world.serve([*tokens, *range(PAGE)]) == 0


def test_another_lifetime_holds_from_then_on() -> None:
    world = World()
    tokens = list(range(2 * PAGE))
    world.serve(tokens)
    for lifetime in (Lifetime(ttl_s=5), Lifetime(max_age_s=7), Lifetime(ttl_s=3, max_age_s=50), Lifetime()):
        world.cache.tree.lifetime = lifetime
        tokens += range(PAGE)
        assert world.serve(tokens) == len(tokens) - PAGE
        world.now += 1
    world.now += 1000
    # The third page was last used under no limit; the fourth keeps the greatest age that it was published with.
    assert world.serve(tokens) == 3 * PAGE


def test_a_path_that_is_read_past_its_deadline_publishes_no_more() -> None:
    world = World(max_age_s=10)
    tokens = np.arange(4 * PAGE, dtype=np.int32)
    table = world.cache.new_table(IDENTITY)
    for page in range(4):
        if page == 2:
            world.now += 11
            world.expire()
            assert world.cache.tree.n_nodes == 0
        world.cache.reserve(table, PAGE)
        world.cache.commit(table, tokens, PAGE)
        assert integrity.check(world.cache) == []
    assert not table.publishes
    assert world.cache.tree.n_nodes == 0
    world.cache.release(table)
    assert world.cache.arena.free_frames == world.cache.arena.n_frames
    assert not host_memory(world.cache.arena.store)[: 2 * 4096].any(), "what has expired leaves no bytes"


def test_a_republished_path_replaces_the_expired_one_that_is_still_read() -> None:
    world = World(max_age_s=10)
    tokens = np.arange(2 * PAGE, dtype=np.int32)
    reader = world.cache.new_table(IDENTITY)
    world.cache.reserve(reader, 2 * PAGE)
    world.cache.commit(reader, tokens, 2 * PAGE)
    world.now += 11
    assert world.serve(tokens.tolist()) == 0
    assert world.serve(tokens.tolist()) == 2 * PAGE
    world.cache.release(reader)
    assert integrity.check(world.cache) == []
    assert world.serve(tokens.tolist()) == 2 * PAGE


def test_expiry_is_bounded_and_memory_comes_back() -> None:
    world = World(ttl_s=5)
    for i in range(20):
        world.serve([i] * 5 * PAGE)
    world.now += 5
    assert world.cache.tree.expire(limit=3) <= 3 * 5
    world.expire()
    assert world.cache.tree.n_nodes == 0
    assert world.cache.arena.free_frames == world.cache.arena.n_frames
    world.now += 100
    for _ in range(3):
        assert world.cache.expire() == 0
    assert world.cache.tree._expiries == []


@pytest.mark.parametrize(
    "bad", [{"ttl_s": 0}, {"ttl_s": float("nan")}, {"max_age_s": -1}, {"ttl_s": 9, "max_age_s": 3}]
)
def test_impossible_lifetimes_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        CachePolicy(**bad)


def test_lifetimes_in_a_running_engine() -> None:
    """TTL 1 s, wait, resend: no hit, and the receipt says why; an idle engine lets go by itself."""
    engine = tiny_engine(replace(CONFIG, policy=CachePolicy(ttl_s=1.0)))
    (cold,) = ask(engine, text(50))
    assert cold.expires_at is not None
    assert cold.expires_at - time.time() == pytest.approx(1.0, abs=0.5)
    (warm,) = ask(engine, text(50))
    assert warm.hit_tokens == 48
    time.sleep(1.05)
    (late,) = ask(engine, text(50))
    assert (late.hit_tokens, why(late)) == (0, ("expired", 0))
    deadline = time.monotonic() + 10
    while engine.stats().pages_cached and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.stats().pages_cached == 0
    (gone,) = ask(engine, text(50))
    assert why(gone) == ("expired", 0), "the ghost list remembers"
    engine.close()


# ---- erasure ------------------------------------------------------------------------------------------------


def sealed_bytes(engine: Engine, tenant: str) -> list[bytes]:
    """The first bytes of each of a tenant's published pages."""

    def read() -> list[bytes]:
        cache = engine._cache
        memory = host_memory(cache.arena.store)
        nodes = [node for node in cache.tree.nodes() if node.identity.tenant == tenant]
        offsets = [int(cache.arena.offsets[slot.handle]) for n in nodes for slot in n.slots]  # type: ignore[union-attr]
        return [memory[offset : offset + 256].tobytes() for offset in offsets]

    return engine.call(read, timeout_s=10)


def count_in_arena(engine: Engine, samples: list[bytes]) -> int:
    data = engine.call(lambda: host_memory(engine._cache.arena.store).tobytes(), timeout_s=10)
    return sum(sample in data for sample in samples)


def sound(engine: Engine) -> None:
    assert engine.call(lambda: integrity.check(engine._cache), timeout_s=10) == []


def test_an_erased_tenant_leaves_nothing_and_others_keep_theirs() -> None:
    engine = tiny_engine(CONFIG)
    ask(engine, text(100), tenant="a")
    ask(engine, text(100), tenant="b")
    mine, theirs = sealed_bytes(engine, "a"), sealed_bytes(engine, "b")
    assert count_in_arena(engine, mine) == len(mine) == 6, "a positive control"
    report = engine.erase("a")
    assert (report.pages, report.pending, report.requests, report.keys) == (6, 0, 0, 1)
    assert report.n_bytes == 6 * engine._cache.classes.sealed(0, "int8").page_bytes
    assert sealed_bytes(engine, "a") == []
    own = [sample for sample in mine if sample not in theirs]
    assert count_in_arena(engine, own) == 0
    assert count_in_arena(engine, theirs) == len(theirs)
    (again,) = ask(engine, text(100), tenant="a")
    assert again.hit_tokens == 0
    (other,) = ask(engine, text(100), tenant="b")
    assert other.hit_tokens == 96
    sound(engine)
    engine.close()


def test_what_was_evicted_or_moved_before_is_erased_too() -> None:
    engine = tiny_engine(CONFIG, n_frames=4)
    ask(engine, text(100, 1), tenant="a")
    samples = sealed_bytes(engine, "a")
    for seed in range(2, 12):
        ask(engine, text(120, seed), tenant="b")
    ask(engine, text(60, 1), tenant="a")
    engine.erase("a")
    assert count_in_arena(engine, samples) == 0
    sound(engine)
    engine.close()


def test_one_salt_of_a_tenant() -> None:
    engine = tiny_engine(CONFIG)
    for salt in ("x", "y"):
        ask(engine, text(60), tenant="a", cache_salt=salt)
    assert engine.erase("a", "x").pages == 3
    (gone,) = ask(engine, text(60), tenant="a", cache_salt="x")
    assert (gone.hit_tokens, why(gone)) == (0, ("erased", 0))
    (kept,) = ask(engine, text(60), tenant="a", cache_salt="y")
    assert kept.hit_tokens == 48
    engine.close()


def test_a_running_request_goes_on_and_its_pages_go_when_it_ends() -> None:
    """The answer is the one that it would have been; what it read is pending until then, and zero after."""
    engine = tiny_engine(CONFIG)
    params = replace(GREEDY, max_tokens=200, logprobs=1)
    want = answer(engine, text(100), params, "reference")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    going, hold = threading.Event(), threading.Event()

    def sink(event: Event) -> None:
        events.put(event)
        if isinstance(event, Delta) and not going.is_set():
            going.set()
            hold.wait(10)

    engine.submit(GenerateRequest("r", prompt_array(text(100)), params, tenant="a"), sink)
    assert going.wait(10)
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: done.put(engine.erase("a"))).start()
    time.sleep(0.1)
    hold.set()
    report = done.get(timeout=10)
    assert report.requests == 1
    assert report.pending == report.pages == 6
    got = collect(events)
    assert got == want
    (again,) = ask(engine, text(100), tenant="a")
    assert again.hit_tokens == 0, "and it published nothing more"
    sound(engine)
    engine.erase("a")
    engine.erase("reference")
    data = engine.call(lambda: host_memory(engine._cache.arena.store).any(), timeout_s=10)
    assert not data, "nothing but zeros"
    engine.close()


def answer(engine: Engine, prompt: list[int], params: SamplingParams, tenant: str) -> list[Any]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(GenerateRequest("answer", prompt_array(prompt), params, tenant=tenant), events.put)
    return collect(events)


def collect(events: queue.SimpleQueue[Event]) -> list[Any]:
    result: list[Any] = []
    while True:
        event = events.get(timeout=30)
        if isinstance(event, Delta):
            result.append((event.text, event.token_ids, event.logprobs))
        elif isinstance(event, Finished):
            return result


# ---- pins ---------------------------------------------------------------------------------------------------


def test_a_pin_outlasts_pressure_and_its_time_to_live() -> None:
    world = World(ttl_s=10)
    pins = Pins(world.cache, lambda: world.now)
    kept = list(range(5 * PAGE))
    world.serve(kept)
    pin = pins.add(IDENTITY, np.array([*kept, 7], dtype=np.int32), 100)
    assert (pin.n_tokens, pin.tenant) == (5 * PAGE, "t")
    for i in range(60):
        world.now += 1
        world.serve([1000 + i] * 12 * PAGE)
        world.expire()
        pins.expire()
    assert world.serve(kept) == 5 * PAGE
    again = pins.add(IDENTITY, np.array(kept, dtype=np.int32), 100)
    assert (again.id, len(pins)) == (pin.id, 1), "the same prefix is the same pin"
    world.now += 101
    pins.expire()
    world.expire()
    assert len(pins) == 0
    assert world.cache.tree.n_nodes == 0
    assert integrity.check(world.cache) == []


def test_pins_cannot_fill_the_cache() -> None:
    world = World()
    pins = Pins(world.cache, lambda: world.now)
    refused = 0
    for i in range(40):
        tokens = [i] * 10 * PAGE
        world.serve(tokens)
        try:
            pins.add(IDENTITY, np.array(tokens, dtype=np.int32), 1000)
        except RequestError as error:
            refused += error.code == "pin_limit_exceeded"
        assert integrity.check(world.cache) == []
    assert refused
    assert len(pins) > 3
    held = sum(pin.n_bytes for pin in pins.of("t"))
    assert held <= world.cache.footprint.arena_bytes // 2
    # A newcomer of four fifths of that is still admitted beside them.
    assert world.serve([99] * (held * 4 // 5 // world.cache.classes[0].page_bytes) * PAGE) == 0
    assert pins.give_way("nobody") is False
    assert pins.give_way() is True


def test_a_pin_ends_with_its_pages() -> None:
    world = World(max_age_s=20)
    pins = Pins(world.cache, lambda: world.now)
    world.serve(list(range(2 * PAGE)))
    pin = pins.add(IDENTITY, np.arange(2 * PAGE, dtype=np.int32), 1000)
    assert pin.expires_at - time.time() == pytest.approx(20, abs=1)
    world.now += 21
    world.expire()
    pins.expire()
    assert len(pins) == 0
    assert world.cache.arena.free_frames == world.cache.arena.n_frames
    world.serve(list(range(2 * PAGE)))
    pin = pins.add(IDENTITY, np.arange(2 * PAGE, dtype=np.int32), 1000)
    assert pins.remove("other", pin.id) is None, "another tenant's"
    assert pins.remove("t", pin.id) is not None
    assert pins.remove("t", pin.id) is None
    with pytest.raises(RequestError, match="nothing to pin"):
        pins.add(IDENTITY, np.arange(500, 500 + PAGE, dtype=np.int32), 10)
    pins.add(IDENTITY, np.arange(2 * PAGE, dtype=np.int32), 1000)
    pins.erase("t", None)
    world.cache.erase("t")
    assert world.cache.arena.free_frames == world.cache.arena.n_frames
    assert integrity.check(world.cache) == []
