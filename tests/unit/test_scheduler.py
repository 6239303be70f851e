"""Who is admitted, beside whom: the scheduler over a real cache, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.cache import integrity
from octavo.cache.classes import PageClasses
from octavo.cache.footprint import Footprint
from octavo.cache.format import Form
from octavo.cache.manager import KVCache
from octavo.cache.quotas import Quota, Quotas
from octavo.cache.spec import CacheSpec, FullGroup
from octavo.engine.messages import GenerateRequest, SamplingParams
from octavo.engine.outlet import Outlet
from octavo.engine.output import ChoiceText
from octavo.engine.prompt import prompt_array
from octavo.engine.request import Request, Sequence, TokenBuffer
from octavo.engine.sampler import Sampler
from octavo.engine.scheduler import ScheduledSequence, Scheduler
from octavo.errors import RequestError
from octavo.ops.host_store import HostStore
from tests.support.tiny import ByteTokenizer

PAGE = 16


class World:
    """A cache of so many sealed pages, one a frame, beside one frame of open pages; and a scheduler over it."""

    def __init__(self, n_pages: int, *, step_tokens: int = 1 << 20) -> None:
        classes = PageClasses(CacheSpec((FullGroup((0,), 1, 8),)), PAGE, [Form("f32", "f32")])
        sealed, opened = classes.sealed(0, "f32"), classes.opened(0)
        assert sealed.page_bytes == opened.page_bytes
        sizes = Footprint(classes, sealed.page_bytes, n_pages)
        self.cache = KVCache(sizes, HostStore(sizes.arena_bytes))
        self.scheduler = Scheduler(self.cache, ("test",), max_num_seqs=64, step_tokens=step_tokens)
        self.n = 0

    def add(self, prompt: list[int], max_tokens: int, tenant: str = "") -> Sequence:
        self.n += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        message = GenerateRequest(str(self.n), prompt_array(prompt), params, tenant=tenant)
        request = Request(message, Outlet(lambda event: None), max_tokens, frozenset())
        text = ChoiceText(ByteTokenizer(), ())
        sequence = Sequence(request, 0, TokenBuffer(message.prompt_token_ids), Sampler(params, 0, 0, ()), text)
        request.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[ScheduledSequence]:
        """One step, after which every sequence that reached its end has one more token, and leaves at its last."""
        step = self.scheduler.schedule()
        self.scheduler.commit(step)
        for item in step:
            sequence = item.sequence
            if sequence.table is not None and not sequence.num_remaining_tokens:
                sequence.tokens.append(1000 + sequence.n_generated)
                sequence.n_generated += 1
                if sequence.n_generated >= sequence.request.max_tokens:
                    self.scheduler.finish(sequence)
        assert integrity.check(self.cache) == []
        return step


def text(n_pages: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200, n_pages * PAGE).tolist()


def test_followers_are_charged_what_they_do_not_share() -> None:
    """A prefix of 600 pages that somebody computes, and 8 followers that need 15 more pages each: in a pool of 1,027
    pages all run at once."""
    world = World(1027)
    prefix = text(600, 0)
    leader = world.add([*prefix, 1], 200)
    world.step()
    followers = [world.add([*prefix, *text(14, 1 + i), 2], 10) for i in range(8)]
    world.step()
    assert [f.table is not None for f in followers] == [True] * 8
    assert all(f.request.num_cached_tokens == 600 * PAGE for f in followers)
    assert leader.table is not None
    assert leader.preemptions == 0


def test_a_preempted_follower_is_charged_what_it_does_not_share() -> None:
    world = World(100)
    prefix = text(60, 0)
    world.add([*prefix, 1], 300)
    world.step()
    follower = world.add([*prefix, *text(2, 1), 2], 20)
    world.step()
    world.scheduler._preempt(follower)
    assert follower.table is None
    world.step()
    assert follower.table is not None, "61 + 62 pages are not in the pool, but 60 of them are there already"


def test_what_a_match_holds_cannot_be_evicted_by_the_admission_that_found_it() -> None:
    """The match is locked before room is asked for: a newcomer whose own hit is all that could be evicted waits."""
    world = World(40)
    done = world.add([*text(20, 0), 1], 1)
    world.step()
    assert done.table is None
    running = world.add([*text(15, 1), 1], 40)
    world.step()
    assert running.table is not None
    newcomer = world.add([*text(20, 0), *text(6, 2), 1], 40)
    world.step()
    assert newcomer.table is None, "20 shared + 7 own + 16 and an open page of the other are more than 40"
    path = world.cache.find_prefix(world.scheduler._identity(newcomer), newcomer.tokens.view(), 1 << 20)
    assert path.n_tokens == 20 * PAGE, "and its hit is still there"
    while running.table is not None:
        world.step()
    world.step()
    assert newcomer.request.num_cached_tokens == 20 * PAGE


@pytest.mark.parametrize("share", [True, False])
def test_ten_that_need_more_than_half_all_finish(share: bool) -> None:
    world = World(20)
    prefix = text(4, 0)
    sequences = [world.add([*(prefix if share else text(4, i)), *text(3, 100 + i), 1], 5 * PAGE) for i in range(10)]
    for _ in range(5000):
        if not world.scheduler.has_work():
            break
        assert world.step(), "a step without work, though there is some"
    assert all(s.n_generated == 5 * PAGE for s in sequences)
    assert max(s.preemptions for s in sequences) <= 2


def test_who_found_no_room_is_not_matched_again_at_every_step() -> None:
    """Matching a long prompt costs; room comes when somebody leaves."""
    world = World(80)
    world.add([*text(40, 0), 1], 3 * PAGE)
    world.step()
    waiting = world.add([*text(60, 1), 1], 1)
    matches = 0
    match_prefix = world.cache.match_prefix

    def counting(*args: object) -> object:
        nonlocal matches
        matches += 1
        return match_prefix(*args)  # type: ignore[arg-type]

    world.cache.match_prefix = counting  # type: ignore[assignment, method-assign]
    for _ in range(2 * PAGE):
        world.step()
    assert waiting.table is None
    assert matches <= 4
    while not waiting.finish_reason and waiting.n_generated == 0:
        world.step()


def test_a_preempted_one_does_not_keep_everybody_out() -> None:
    """Requests that name no max_tokens could take the whole context each; few do. After a preemption newcomers start
    while most of the pool is free."""
    world = World(100)
    sequences = [world.add(text(9, i)[:142], 1400) for i in range(9)]
    while not any(s.preemptions for s in sequences):
        world.step()
    for sequence in [s for s in sequences if s.table is not None][1:]:
        world.scheduler.finish(sequence)
    newcomer = world.add([1, 2, 3], 1)
    for _ in range(20):
        world.step()
    assert newcomer.n_generated == 1
    for _ in range(30_000):
        if not world.scheduler.has_work():
            break
        world.step()
    assert not world.scheduler.has_work()
    assert max(s.preemptions for s in sequences) <= 4


def test_last_use_is_when_a_read_ends() -> None:
    """What was read longest ago goes first, counted from the end of the reading."""
    world = World(40)
    identity = world.scheduler._identity(world.add([1], 1))
    tables = []
    for seed in range(2):
        tokens = np.array(text(3, seed), dtype=np.int32)
        table = world.cache.new_table(identity)
        world.cache.reserve(table, len(tokens))
        world.cache.commit(table, tokens, len(tokens))
        tables.append((table, tokens))
    (long_read, first), (short_read, second) = tables
    world.cache.release(short_read)
    world.cache.release(long_read)
    for _ in range(3):
        world.cache.tree.evict_one()
    assert world.cache.find_prefix(identity, first, len(first)).n_tokens == len(first)
    assert world.cache.find_prefix(identity, second, len(second)).n_tokens == 0


def test_a_capped_tenant_waits_for_its_own_and_keeps_nobody_else() -> None:
    world = World(100)
    page_bytes = world.cache.classes[0].page_bytes
    world.cache.quotas = Quotas({"capped": Quota(cap=12 * page_bytes)})
    first = world.add(text(5, 0), 3 * PAGE, tenant="capped")
    world.step()
    second = world.add(text(5, 1), 1, tenant="capped")
    other = world.add(text(20, 2), 1, tenant="other")
    world.step()
    assert (first.table is not None, second.table is not None, other.n_generated) == (True, False, 1)
    while first.table is not None:
        world.step()
    world.step()
    assert second.n_generated == 1
    assert world.cache.usage_of("capped").used <= 12 * page_bytes
    with pytest.raises(RequestError, match="cap is"):
        world.add(text(13, 3), 1, tenant="capped")


def test_a_floor_is_kept_from_a_noisy_neighbour() -> None:
    world = World(60)
    page_bytes = world.cache.classes[0].page_bytes
    world.cache.quotas = Quotas({"quiet": Quota(floor=20 * page_bytes)})
    world.add([*text(20, 0), 1], 1, tenant="quiet")
    world.step()
    for seed in range(1, 30):
        world.add([*text(12, seed), 1], 2, tenant="noisy")
    for _ in range(400):
        world.step()
        assert world.cache.usage_of("quiet").used >= 20 * page_bytes
    assert not world.scheduler.has_work()
    again = world.add([*text(20, 0), 1], 1, tenant="quiet")
    world.step()
    assert again.request.num_cached_tokens == 20 * PAGE


def test_at_its_cap_a_tenant_preempts_its_own() -> None:
    world = World(100)
    page_bytes = world.cache.classes[0].page_bytes
    world.cache.quotas = Quotas({"capped": Quota(cap=16 * page_bytes)})
    mine = [world.add(text(3, i), 6 * PAGE, tenant="capped") for i in range(2)]
    other = world.add(text(3, 9), 20 * PAGE, tenant="other")
    for _ in range(400):
        world.step()
    assert [s.n_generated for s in (*mine, other)] == [6 * PAGE, 6 * PAGE, 20 * PAGE]
    assert other.preemptions == 0
