"""The cache against a model of plain dicts, with every page's bytes standing for what it should hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from octavo.cache import integrity
from octavo.cache.footprint import Footprint
from octavo.cache.format import Form, build_format, open_format
from octavo.cache.manager import KVCache
from octavo.cache.pages import release
from octavo.cache.radix import PrefixIdentity
from octavo.cache.spec import CacheSpec, FullGroup
from octavo.cache.table import BlockTable
from octavo.errors import OutOfPages

SPEC = CacheSpec((FullGroup((0, 1), n_kv_heads=1, head_dim=8),))
PAGE = 16
N_FRAMES = 5

names = st.sampled_from(["a", "b"])
#: Few distinct tokens, so that prefixes coincide often.
runs = st.lists(st.integers(0, 1), min_size=1, max_size=3 * PAGE).map(lambda xs: [x for x in xs for _ in range(2)])


def identity(namespace: str) -> PrefixIdentity:
    return PrefixIdentity(("test",), "", "int8", "all", namespace)


def footprint() -> Footprint:
    sealed, opened = build_format(SPEC.groups[0], PAGE, Form("int8", "int8")), open_format(SPEC.groups[0], PAGE)
    frame = 3 * sealed.page_bytes + 64
    assert frame >= opened.page_bytes
    return Footprint(sealed, opened, frame, N_FRAMES)


def stamp(namespace: str, tokens: list[int]) -> bytes:
    return hashlib.sha256(f"{namespace}:{tokens}".encode()).digest()


class CacheMachine(RuleBasedStateMachine):
    """Tables are named by number; the model holds each one's namespace and tokens, and what was published."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(footprint())
        self.tokens: dict[int, list[int]] = {}
        self.real: dict[int, BlockTable] = {}
        self.published: set[tuple[str, tuple[int, ...]]] = set()
        self.n = 0

    def name(self, table: BlockTable, tokens: list[int]) -> int:
        self.n += 1
        self.real[self.n], self.tokens[self.n] = table, tokens
        return self.n

    @rule(target=tables, namespace=names, prompt=runs)
    def match(self, namespace: str, prompt: list[int]) -> int:
        table = self.cache.new_table(identity(namespace))
        cached = self.cache.match_prefix(table, np.array(prompt, dtype=np.int32), len(prompt) - 1)
        assert cached % PAGE == 0
        assert cached < len(prompt)
        for end in range(PAGE, cached + 1, PAGE):
            assert (namespace, tuple(prompt[:end])) in self.published, "a hit on what nobody published"
        return self.name(table, prompt[:cached])

    @rule(table=tables, more=runs)
    def append(self, table: int, more: list[int]) -> None:
        real, tokens = self.real[table], self.tokens[table]
        before = (list(real.pages), list(real.nodes), real.open_page, real.num_computed_tokens)
        try:
            self.cache.reserve(real, len(more))
        except OutOfPages:
            assert before == (real.pages, real.nodes, real.open_page, real.num_computed_tokens)
            return
        tokens.extend(more)
        self.write(real, tokens, real.num_computed_tokens)
        self.cache.commit(real, np.array(tokens, dtype=np.int32), len(more))
        for end in range(PAGE, len(tokens) + 1, PAGE):
            self.published.add((real.identity.namespace, tuple(tokens[:end])))

    @rule(table=tables, more=runs)
    def fail_a_step(self, table: int, more: list[int]) -> None:
        real = self.real[table]
        try:
            self.cache.reserve(real, len(more))
        except OutOfPages:
            return
        for page in real.pages[len(self.tokens[table]) // PAGE :]:
            self.cache.arena.view(page.handle)[:] = 0xEE
        self.cache.rollback(real)

    @rule(target=tables, table=tables)
    def fork(self, table: int) -> object:
        try:
            child = self.cache.fork(self.real[table])
        except OutOfPages:
            return multiple()
        return self.name(child, list(self.tokens[table]))

    @rule(table=consumes(tables))
    def release(self, table: int) -> None:
        self.cache.release(self.real.pop(table))
        del self.tokens[table]

    @rule()
    def evict(self) -> None:
        cached = self.cache.stats().sealed_cached
        assert self.cache.tree.evict_one() == (cached > 0), "cached pages are all evictable, leaves first"
        assert self.cache.stats().sealed_cached == max(cached - 1, 0)

    @rule()
    def compact(self) -> None:
        before = self.cache.arena.free_frames
        moved = self.cache.arena.compact()
        assert self.cache.arena.free_frames == before + moved

    @precondition(lambda self: not self.real)
    @rule()
    def empty(self) -> None:
        self.cache.tree.clear()
        assert self.cache.arena.free_frames == N_FRAMES

    @invariant()
    def sound(self) -> None:
        assert integrity.check(self.cache) == []

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for key, real in self.real.items():
            tokens = self.tokens[key]
            assert real.num_computed_tokens == len(tokens)
            for i, page in enumerate(real.pages):
                want = stamp(real.identity.namespace, tokens[: (i + 1) * PAGE])
                assert bytes(self.cache.arena.view(page.handle)[:32]) == want
            if len(tokens) % PAGE:
                assert real.open_page is not None
                view = self.cache.arena.view(real.open_page.handle)
                assert bytes(view[:32]) == stamp(real.identity.namespace, tokens)

    def write(self, real: BlockTable, tokens: list[int], start: int) -> None:
        """What a forward pass does: seal the pages that fill, keep the tail in the open page."""
        for i in range(start // PAGE, len(tokens) // PAGE):
            content = stamp(real.identity.namespace, tokens[: (i + 1) * PAGE])
            self.cache.arena.view(real.pages[i].handle)[:32] = np.frombuffer(content, dtype=np.uint8)
        if len(tokens) % PAGE:
            assert real.open_page is not None
            content = stamp(real.identity.namespace, tokens)
            self.cache.arena.view(real.open_page.handle)[:32] = np.frombuffer(content, dtype=np.uint8)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@pytest.mark.slow
def test_cache_long() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=400, stateful_step_count=60, deadline=None))


def _two_sequences() -> tuple[KVCache, BlockTable, BlockTable]:
    cache = KVCache(footprint())
    tokens = np.arange(2 * PAGE, dtype=np.int32)
    first = cache.new_table(identity("a"))
    cache.reserve(first, len(tokens))
    cache.commit(first, tokens, len(tokens))
    second = cache.new_table(identity("a"))
    assert cache.match_prefix(second, tokens, len(tokens)) == len(tokens)
    assert integrity.check(cache) == []
    return cache, first, second


def _skip_unlock(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    cache.tables.discard(second)


def _free_a_shared_page(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    cache.arena.free(first.pages[0].handle)


def _release_twice(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    release(first.pages[1], cache.arena)


def _drop_a_node(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    first.nodes[0].children.clear()


def _move_without_telling(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    handle = first.pages[0].handle
    cache.arena.offsets[handle] = cache.arena.offsets[first.pages[1].handle]


def _miscount_cached(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    cache.tree.n_cached += 1


@pytest.mark.parametrize(
    "fault",
    [_skip_unlock, _free_a_shared_page, _release_twice, _drop_a_node, _move_without_telling, _miscount_cached],
)
def test_the_checker_catches_planted_faults(fault: Callable[[KVCache, BlockTable, BlockTable], None]) -> None:
    cache, first, second = _two_sequences()
    fault(cache, first, second)
    assert integrity.check(cache), f"{fault.__name__} went unnoticed"
