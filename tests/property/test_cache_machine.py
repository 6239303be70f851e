"""The cache against a model of plain dicts, with every page's bytes standing for what it should hold.

Two groups: full attention, and a window whose older pages go. Three forms: two sealed ones, between which tables
choose, and the open one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from octavo.cache import integrity
from octavo.cache.classes import PageClasses
from octavo.cache.eviction import Evicted
from octavo.cache.footprint import Footprint
from octavo.cache.format import Form
from octavo.cache.lifetime import Lifetime
from octavo.cache.manager import KVCache
from octavo.cache.quotas import Quota, Quotas
from octavo.cache.radix import Lower, PrefixIdentity, Resident
from octavo.cache.spec import CacheSpec, FullGroup
from octavo.cache.store import ExportedPage
from octavo.cache.table import BlockTable
from octavo.errors import IntegrityError, OutOfPages
from octavo.ops.host_store import HostStore
from tests.support.groups import SlidingGroup

PAGE = 16
WINDOW = 20
SPEC = CacheSpec((FullGroup((0, 2), n_kv_heads=1, head_dim=8), SlidingGroup((1,), 1, 8, WINDOW)))
TTL = 10.0
#: Of about 110,000 bytes: one tenant is capped, the other is promised something.
QUOTAS = Quotas({"a": Quota(cap=60_000), "b": Quota(floor=20_000)})
FORMS = [Form("int8", "int8"), Form("f16", "int8")]
N_FRAMES = 20
#: What a failed step leaves in its pages.
FAILED = b"\xdd" * 32

names = st.sampled_from(["a", "b"])
forms = st.sampled_from([form.name for form in FORMS])
#: Texts that begin alike: text k is text 0 up to token 24 k, so that prefixes coincide often and part in mid-page.
TEXTS = [[0] * 24 * k + [k] * (400 - 24 * k) for k in range(4)]
texts = st.sampled_from(range(len(TEXTS)))
lengths = st.integers(1, 5 * PAGE)


def identity(tenant: str, form: str = "int8") -> PrefixIdentity:
    return PrefixIdentity(("test",), "", form, "all", tenant, "")


def footprint() -> Footprint:
    classes = PageClasses(SPEC, PAGE, FORMS)
    return Footprint(classes, max(c.page_bytes for c in classes) + 192, N_FRAMES)


class OnlyStore:
    """A store whose memory nothing else can reach: a test double over private bytes."""

    def __init__(self, n_bytes: int) -> None:
        self._bytes = bytearray(n_bytes)

    @property
    def n_bytes(self) -> int:
        return len(self._bytes)

    def copy_page(self, source: int, target: int, n_bytes: int) -> None:
        assert abs(source - target) >= n_bytes, "the two places overlap"
        self._bytes[target : target + n_bytes] = self._bytes[source : source + n_bytes]

    def zero(self, offset: int, n_bytes: int) -> None:
        self._bytes[offset : offset + n_bytes] = bytes(n_bytes)

    def export_page(self, offset: int, n_bytes: int) -> ExportedPage:
        data = bytes(self._bytes[offset : offset + n_bytes])
        return ExportedPage(data, hashlib.sha256(data).digest())

    def import_page(self, offset: int, page: ExportedPage) -> None:
        assert hashlib.sha256(page.data).digest() == page.checksum
        self._bytes[offset : offset + len(page.data)] = page.data

    def close(self) -> None:
        self._bytes.clear()


class Listener:
    """Every eviction that was told of, checked against what stands in the tree at that moment."""

    def __init__(self) -> None:
        self.n = 0

    def evicted(self, event: Evicted) -> None:
        assert isinstance(event.node.slots[event.group], Resident), "told too late"
        self.n += 1


def stamp(group: int, form: str, tenant: str, tokens: list[int]) -> bytes:
    return hashlib.sha256(f"{group}:{form}:{tenant}:{tokens}".encode()).digest()


class CacheMachine(RuleBasedStateMachine):
    """Tables are named by number; the model holds each one's tenant and tokens, and what was published."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        sizes = footprint()
        self.listener = Listener()
        self.now = 0.0
        self.store = OnlyStore(sizes.arena_bytes)
        self.cache = KVCache(
            sizes,
            self.store,
            observer=self.listener,
            lifetime=Lifetime(ttl_s=TTL),
            quotas=QUOTAS,
            clock=lambda: self.now,
        )
        self.tokens: dict[int, list[int]] = {}
        self.real: dict[int, BlockTable] = {}
        #: When each published prefix was last used.
        self.published: dict[tuple[str, str, tuple[int, ...]], float] = {}
        #: What was ever written for a tenant.
        self.stamps: dict[str, set[bytes]] = {"a": set(), "b": set()}
        self.n = 0

    def name(self, table: BlockTable, tokens: list[int]) -> int:
        self.n += 1
        self.real[self.n], self.tokens[self.n] = table, tokens
        return self.n

    @rule(target=tables, tenant=names, form=forms, text=texts, n=lengths)
    def match(self, tenant: str, form: str, text: int, n: int) -> int:
        prompt = TEXTS[text][:n]
        table = self.cache.new_table(identity(tenant, form))
        match = self.cache.match_prefix(table, np.array(prompt, dtype=np.int32), len(prompt) - 1)
        cached = match.n_tokens
        assert cached == table.num_computed_tokens == match.end.at_token == len(match.path) * PAGE
        assert cached < len(prompt)
        for end in range(PAGE, cached + 1, PAGE):
            used = self.published.get((tenant, form, tuple(prompt[:end])))
            assert used is not None, "a hit on what nobody published, or on what was erased"
            assert self.now < used + TTL, "a hit on what has expired"
        if cached + PAGE < len(prompt):
            assert match.end.reason != "limit"
        else:
            assert match.end.reason in ("limit", "missing", "expired")
        self.use(table, prompt[:cached])
        return self.name(table, prompt[:cached])

    @rule(table=tables, text=texts, n=lengths)
    def append(self, table: int, text: int, n: int) -> None:
        real, tokens = self.real[table], self.tokens[table]
        more = TEXTS[text][len(tokens) : len(tokens) + n]
        before = self.state(real)
        other = "b" if real.identity.tenant == "a" else "a"
        theirs = self.cache.usage_of(other).used
        try:
            self.cache.reserve(real, len(more))
        except OutOfPages:
            assert before == self.state(real)
            return
        finally:
            after = self.cache.usage_of(other).used
            assert after == theirs or after >= QUOTAS.floor(other), "taken below its floor"
        tokens.extend(more)
        self.write(real, tokens, real.num_computed_tokens)
        self.cache.commit(real, np.array(tokens, dtype=np.int32), len(more))
        if real.publishes and len(tokens) // PAGE > (len(tokens) - len(more)) // PAGE:
            self.use(real, tokens)

    @rule(tenant=names, form=forms, text=texts, n=lengths)
    def serve(self, tenant: str, form: str, text: int, n: int) -> None:
        """A whole request, from match to release: most of what a cache sees."""
        table = self.match(tenant, form, text, n)
        self.append(table, text, n - len(self.tokens[table]))
        self.release(table)

    @rule(table=tables, n=lengths)
    def fail_a_step(self, table: int, n: int) -> None:
        real = self.real[table]
        try:
            self.cache.reserve(real, n)
        except OutOfPages:
            return
        n_full = len(self.tokens[table]) // PAGE
        for own in real.groups:
            for handle in own.entries.handles[n_full - own.n_passed :]:
                self.fill(int(handle), FAILED)
        self.cache.rollback(real)

    @rule(target=tables, table=tables)
    def fork(self, table: int) -> object:
        tables = len(self.cache.tables)
        try:
            child = self.cache.fork(self.real[table])
        except OutOfPages:
            assert len(self.cache.tables) == tables
            return multiple()
        return self.name(child, list(self.tokens[table]))

    @rule(table=consumes(tables))
    def release(self, table: int) -> None:
        real, tokens = self.real.pop(table), self.tokens.pop(table)
        if real.publishes and real.node is not None:
            self.use(real, tokens)
        self.cache.release(real)

    @rule(seconds=st.sampled_from([1.0, TTL / 4, TTL / 2]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        """What goes has outlived its time, and leaves no bytes behind."""
        while self.cache.expire():
            pass
        for node in self.cache.tree.nodes():
            assert node.expires_at > self.now or node.children or node.lock_count

    @rule(tenant=names)
    def erase(self, tenant: str) -> None:
        """At once nothing can be found, and no byte is left but of what running sequences still read."""
        erasure = self.cache.erase(tenant)
        self.published = {key: used for key, used in self.published.items() if key[0] != tenant}
        assert erasure.pending <= erasure.pages
        assert not any(node.identity.tenant == tenant for node in self.cache.tree.nodes())
        assert all(t.erased for t in self.real.values() if t.identity.tenant == tenant)
        self.no_bytes_of(tenant)

    @rule()
    def evict(self) -> None:
        cached, told = self.cached(), self.listener.n
        assert self.cache.tree.evict_one() == (cached > 0), "cached pages can all be evicted"
        assert self.cached() <= max(cached - 1, 0)
        assert self.listener.n == self.cache.tree.evicted_pages >= told + (cached > 0)

    @rule(table=tables, which=st.integers(0, 1))
    def copy_a_pinned_page(self, table: int, which: int) -> None:
        """While it is copied, a page stays where it is, whatever happens to its table and to its neighbours."""
        own = self.real[table].groups[which]
        if not len(own.entries):
            return
        handles = own.entries.handles[-1:].copy()
        with self.cache.arena.pinned(handles) as offsets:
            before = self.cache.arena.store.export_page(int(offsets[0]), 32)
            while self.cache.arena.compact():
                pass
            self.cache.tree.evict_one()
            assert self.cache.arena.offsets[handles[0]] == offsets[0]
            assert self.cache.arena.store.export_page(int(offsets[0]), 32) == before

    @rule(table=tables, n=st.integers(1, 6))
    def has_room_keeps_its_word(self, table: int, n: int) -> None:
        """What is said to fit can be reserved."""
        real = self.real[table]
        total = real.num_computed_tokens + n * PAGE
        # Full pages and no other, so that what is reserved is what a sequence of that length holds, and its window.
        need = self.cache.more_pages(real, total)
        for g, own in enumerate(real.groups):
            sealed = self.cache.classes.sealed(g, real.identity.stored_form).index
            need[sealed] = total // PAGE - own.n_pages
        tenant = real.identity.tenant
        if self.cache.has_room(need, tenant) and self.cache.within_cap(need, tenant):
            self.cache.reserve(real, n * PAGE)
            self.cache.rollback(real)

    @rule()
    def compact(self) -> None:
        before = self.cache.arena.free_frames
        moved = self.cache.arena.compact()
        assert self.cache.arena.free_frames == before + moved

    @precondition(lambda self: not self.real)
    @rule()
    def empty(self) -> None:
        self.cache.tree.clear()
        assert self.cache.tree.n_nodes == 0
        assert self.cache.arena.free_frames == N_FRAMES

    @invariant()
    def sound(self) -> None:
        assert integrity.check(self.cache) == []

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for key, real in self.real.items():
            tokens = self.tokens[key]
            form, tenant = real.identity.stored_form, real.identity.tenant
            assert real.num_computed_tokens == len(tokens)
            for g, own in enumerate(real.groups):
                first = SPEC.groups[g].first_page_read(len(tokens), PAGE)
                assert own.n_passed == first, "pages behind the window are given back"
                for handle, position in zip(own.entries.handles, own.entries.positions, strict=True):
                    want = stamp(g, form, tenant, tokens[: position + PAGE])
                    assert self.bytes_of(int(handle)) == want
                if len(tokens) % PAGE:
                    assert own.open_page is not None
                    assert self.bytes_of(own.open_page) == stamp(g, "open", tenant, tokens)

    def no_bytes_of(self, tenant: str) -> None:
        """Beyond what tables of that tenant read now."""
        read = {
            self.bytes_of(handle)
            for real in self.real.values()
            if real.identity.tenant == tenant
            for own in real.groups
            for handle in [*own.entries.handles.tolist(), *([] if own.open_page is None else [own.open_page])]
        }
        data = bytes(self.store._bytes)
        left = [(stamp, data.index(stamp)) for stamp in self.stamps[tenant] - read if stamp in data]
        assert not left, f"pages of tenant {tenant} are still there, at {[at for _, at in left]}"

    def use(self, real: BlockTable, tokens: list[int]) -> None:
        for end in range(PAGE, len(tokens) + 1, PAGE):
            self.published[real.identity.tenant, real.identity.stored_form, tuple(tokens[:end])] = self.now

    def cached(self) -> int:
        return sum(usage.cached for usage in self.cache.stats().usage)

    def state(self, real: BlockTable) -> object:
        groups = [(own.entries.handles.tolist(), own.n_passed, own.open_page) for own in real.groups]
        return groups, real.node, real.num_computed_tokens

    def write(self, real: BlockTable, tokens: list[int], start: int) -> None:
        """What a forward pass does: seal the pages that fill, keep the tail in the open page."""
        form, tenant = real.identity.stored_form, real.identity.tenant
        for g, own in enumerate(real.groups):
            for i in range(start // PAGE, len(tokens) // PAGE):
                content = stamp(g, form, tenant, tokens[: (i + 1) * PAGE])
                self.fill(int(own.entries.handles[i - own.n_passed]), content)
            if len(tokens) % PAGE:
                assert own.open_page is not None
                self.fill(own.open_page, stamp(g, "open", tenant, tokens))

    def fill(self, handle: int, content: bytes) -> None:
        for real in self.cache.tables:
            if content != FAILED and any(
                handle in own.entries.handles or handle == own.open_page for own in real.groups
            ):
                self.stamps[real.identity.tenant].add(content)
        store, offset = self.cache.arena.store, int(self.cache.arena.offsets[handle])
        store.import_page(offset, ExportedPage(content, hashlib.sha256(content).digest()))

    def bytes_of(self, handle: int) -> bytes:
        return self.cache.arena.store.export_page(int(self.cache.arena.offsets[handle]), 32).data


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@pytest.mark.slow
def test_cache_long() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=400, stateful_step_count=60, deadline=None))


def new_cache() -> KVCache:
    sizes = footprint()
    return KVCache(sizes, HostStore(sizes.arena_bytes))


def _two_sequences() -> tuple[KVCache, BlockTable, BlockTable]:
    cache = new_cache()
    tokens = np.arange(2 * PAGE, dtype=np.int32)
    first = cache.new_table(identity("a"))
    cache.reserve(first, len(tokens))
    cache.commit(first, tokens, len(tokens))
    second = cache.new_table(identity("a"))
    assert cache.match_prefix(second, tokens, len(tokens)).n_tokens == len(tokens)
    assert integrity.check(cache) == []
    return cache, first, second


def _skip_unlock(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    cache.tables.discard(second)


def _skip_only_the_unlock(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    second.node = None


def _free_a_shared_page(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    handles = first.groups[0].entries.handles[:1]
    for _ in range(int(cache.arena.ref_count[handles[0]])):
        cache.arena.release(handles)


def _release_twice(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    cache.arena.release(first.groups[1].entries.handles[1:])


def _drop_a_node(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    assert first.node is not None
    assert first.node.parent is not None
    first.node.parent.children.clear()


def _move_without_telling(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    one, other = first.groups[0].entries.handles
    cache.arena.offsets[one] = cache.arena.offsets[other]


def _miscount_cached(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    cache.arena._classes[0].n_cached += 1


def _empty_a_slot_that_is_read(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    assert first.node is not None
    first.node.slots[0] = None


def _give_back_too_much(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    own = second.groups[0]
    cache.arena.release(own.entries.handles[:1])
    own.entries.drop_first(1)
    own.n_passed += 1


def _wrong_form(cache: KVCache, first: BlockTable, second: BlockTable) -> None:
    handle = first.groups[0].entries.handles[0]
    cache.arena.page_class[handle] = cache.classes.sealed(0, FORMS[1].name).index


@pytest.mark.parametrize(
    "fault",
    [
        _skip_unlock, _skip_only_the_unlock, _free_a_shared_page, _release_twice, _drop_a_node, _move_without_telling,
        _miscount_cached, _empty_a_slot_that_is_read, _give_back_too_much, _wrong_form,
    ],
)  # fmt: skip
def test_the_checker_catches_planted_faults(fault: Callable[[KVCache, BlockTable, BlockTable], None]) -> None:
    cache, first, second = _two_sequences()
    fault(cache, first, second)
    assert integrity.check(cache), f"{fault.__name__} went unnoticed"


def test_a_window_that_is_gone_ends_a_hit() -> None:
    """A hit needs the window's last pages; it falls back to the longest prefix that every group can serve."""
    cache = new_cache()
    tokens = np.arange(6 * PAGE, dtype=np.int32)
    table = cache.new_table(identity("a"))
    for _ in range(6):
        cache.reserve(table, PAGE)
        cache.commit(table, tokens, PAGE)
    cache.release(table)
    assert cache.find_prefix(identity("a"), tokens, len(tokens)).n_tokens == 6 * PAGE
    path = cache.find_prefix(identity("a"), tokens, len(tokens)).path
    cache.tree._empty(path[4], 1)
    match = cache.find_prefix(identity("a"), tokens, len(tokens))
    # Behind page 4 (64 .. 79) the window of 20 reads pages 3 and 4 only if it starts at 80; at 64 it reads 2 and 3.
    assert (match.n_tokens, match.end.reason, match.end.group) == (4 * PAGE, "missing", "sliding")
    table = cache.new_table(identity("a"))
    cache.match_prefix(table, tokens, len(tokens))
    assert [own.n_passed for own in table.groups] == [0, 2]
    # Computed again, the page takes the empty place, and the old continuation can be had again.
    cache.reserve(table, PAGE)
    cache.commit(table, tokens, PAGE)
    cache.release(table)
    assert cache.find_prefix(identity("a"), tokens, len(tokens)).n_tokens == 6 * PAGE
    assert integrity.check(cache) == []


def test_a_page_in_a_lower_tier_is_no_hit_and_keeps_its_children() -> None:
    cache, first, second = _two_sequences()
    tokens = np.arange(2 * PAGE, dtype=np.int32)
    cache.release(first)
    cache.release(second)
    top = cache.find_prefix(identity("a"), tokens, len(tokens)).path[0]
    cache.tree._empty(top, 0)
    top.slots[0] = Lower("disk", b"key")
    match = cache.find_prefix(identity("a"), tokens, len(tokens))
    assert (match.n_tokens, match.end.reason, match.end.group) == (0, "missing", "full")
    assert top.children
    assert integrity.check(cache) == []


def test_forms_and_ends_of_matches() -> None:
    cache, _, _ = _two_sequences()
    tokens = np.arange(3 * PAGE, dtype=np.int32)
    other = np.concatenate([tokens[:PAGE], tokens[:PAGE]])

    def end(identity: PrefixIdentity, tokens: np.ndarray, limit: int = 1 << 30) -> tuple[str, int]:
        match = cache.find_prefix(identity, tokens, limit)
        return match.end.reason, match.end.at_token

    assert end(identity("a"), tokens) == ("published_end", 2 * PAGE)
    assert end(identity("a"), tokens, 2 * PAGE - 1) == ("limit", PAGE)
    assert end(identity("a"), other) == ("diverged", PAGE)
    assert end(identity("a"), other[1:]) == ("diverged", 0)
    assert end(identity("b"), tokens) == ("cold", 0)
    assert end(identity("a", FORMS[1].name), tokens) == ("cold", 0)
    with pytest.raises(KeyError):
        cache.new_table(identity("a", "int2"))


def test_a_changed_page_is_not_imported() -> None:
    store = HostStore(4096)
    store.memory[:] = 7
    page = store.export_page(64, 1024)
    store.zero(64, 1024)
    store.import_page(2048, page)
    assert (store.memory[2048:3072] == 7).all()
    damaged = ExportedPage(page.data[:-1] + b"\x00", page.checksum)
    with pytest.raises(IntegrityError):
        store.import_page(64, damaged)
    assert (store.memory[64:1088] == 0).all(), "nothing was written"
