"""Who computes what in the next step.

Decoding sequences first, one token each; then prompts, oldest first, in chunks, until the step's token budget is spent.
When pages run out the youngest sequence is preempted: its pages are released (published ones stay cached), and it is
computed again later, to the same bits.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from octavo.cache.ghosts import Ghosts
from octavo.cache.manager import KVCache
from octavo.cache.misses import find_miss
from octavo.cache.pins import Pins
from octavo.cache.radix import Match, PrefixIdentity
from octavo.cache.table import BlockTable
from octavo.engine.messages import Started
from octavo.engine.request import Request, Sequence
from octavo.errors import CodecRangeError, OutOfPages, RequestError

T = TypeVar("T")

#: Room beyond its tokens that one which was preempted once waits for, for itself and for each that runs.
PREEMPTED_PAGES = 16
#: Steps after which one that found no room looks again though nobody has left.
ADMISSION_RETRY_STEPS = 16


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`n_tokens` more tokens of a sequence whose pages are reserved."""

    sequence: Sequence
    n_tokens: int


class Scheduler:
    """Holds every sequence that is neither finished nor failed: in `waiting` (no pages) or in `running`.

    Both are in order of age; sequences of one request stay together.
    """

    def __init__(
        self,
        cache: KVCache,
        fingerprint: tuple[str, ...],
        *,
        max_num_seqs: int,
        step_tokens: int,
        ghosts: Ghosts | None = None,
        pins: Pins | None = None,
    ) -> None:
        self._cache = cache
        self._pins = pins
        self._ghosts = ghosts
        self._fingerprint = fingerprint
        self._max_num_seqs = max_num_seqs
        self._step_tokens = step_tokens
        #: Who found no room, after how many releases, and when: matching a long prompt costs.
        self._blocked: tuple[Sequence, int, int] | None = None
        self._releases = 0
        self._steps = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Raises RequestError for one that can never fit into its tenant's cap."""
        tenant, total = sequence.request.message.tenant, sequence.max_total_tokens()
        cap, needed = self._cache.quotas.cap(tenant), self._cache.bytes_for(total)
        if cap is not None and needed > cap:
            raise RequestError(
                f"the request may need {needed:,} bytes of cache for its {total:,} tokens, and this tenant's cap is "
                f"{cap:,} bytes; ask for less, or for fewer tokens",
                param="max_tokens",
                code="tenant_cap_exceeded",
            )
        self.waiting.append(sequence)

    def what_if(self, hit_tokens: int, query_tokens: int) -> list[tuple[float, float]]:
        """See `Ghosts.what_if`."""
        return self._ghosts.what_if(hit_tokens, query_tokens) if self._ghosts is not None else []

    def forget_ghosts(self, tenant: str) -> int:
        """Destroy the key of a tenant's ghosts; how many keys there were."""
        return self._ghosts.forget_tenant(tenant) if self._ghosts is not None else 0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step's tokens and reserve their pages. Empty only when there is no work."""
        step: list[ScheduledSequence] = []
        self._steps += 1
        budget = self._step_tokens
        for decoding in (True, False):
            # A copy, since reserving may preempt from the end of the list.
            for sequence in list(self.running):
                if budget == 0:
                    break
                if sequence.table is None or sequence.is_decoding != decoding:
                    continue
                n = min(sequence.num_remaining_tokens, budget)
                if self._reserve(sequence, n, step):
                    step.append(ScheduledSequence(sequence, n))
                    budget -= n
        self._admit_waiting(step, budget)
        return step

    def _admit_waiting(self, step: list[ScheduledSequence], budget: int) -> None:
        """Start waiting sequences, oldest first, as far as the budget and the pages go."""
        for sequence in list(islice(self.waiting, self._max_num_seqs)):
            if budget == 0 or len(self.running) >= self._max_num_seqs:
                return
            if self._is_being_computed(sequence):
                continue  # its prefix is a few steps from being published: then it is a hit
            if self._blocked == (sequence, self._releases, self._steps // ADMISSION_RETRY_STEPS):
                return
            table = self._cache.new_table(self._identity(sequence))
            table.erased = sequence.request.erased
            # Matched first, so that what is shared is locked, and charged to nobody.
            match = self._cache.match_prefix(table, sequence.tokens.view(), self._match_limit(sequence))
            if not self._is_within_cap(sequence, table):
                self._cache.release(table)
                continue  # it waits for its own tenant's, and keeps nobody else
            if not self._has_room(sequence, table):
                self._cache.release(table)
                self._blocked = (sequence, self._releases, self._steps // ADMISSION_RETRY_STEPS)
                return
            self.waiting.remove(sequence)
            self._admit(sequence, table, match)
            n = min(sequence.num_remaining_tokens, budget)
            if self._take_pages(sequence, n) is not None:
                # Nothing was computed, so this is not a preemption.
                self._release(sequence)
                self.waiting.appendleft(sequence)
                return
            step.append(ScheduledSequence(sequence, n))
            budget -= n

    def commit(self, step: list[ScheduledSequence]) -> None:
        """The step has run: count its tokens as computed and publish the pages that it filled."""
        for item in step:
            table = item.sequence.table
            assert table is not None
            self._cache.commit(table, item.sequence.tokens.view(), item.n_tokens)

    def rollback(self, step: list[ScheduledSequence]) -> None:
        """The step has failed: give back what was reserved for it."""
        for item in step:
            if item.sequence.table is not None:
                self._cache.rollback(item.sequence.table)

    def isolated(
        self,
        step: list[ScheduledSequence],
        run: Callable[[list[ScheduledSequence]], T],
        fail: Callable[[Request, Exception], None],
    ) -> Iterator[tuple[list[ScheduledSequence], T]]:
        """Run a step: the items that ran together, and the result of `run`.

        When a page of some sequence cannot be sealed, each runs alone, so that only that one fails: results are the
        same to the bit, alone or together. Each pair must be dealt with before the next is asked for.
        """
        try:
            result = run(step)
        except CodecRangeError as error:
            self.rollback(step)
            if len(step) == 1:
                fail(step[0].sequence.request, error)
                return
        else:
            yield step, result
            return
        for item in step:
            if item.sequence.table is None:
                continue  # its request has failed
            try:
                self._reserve_pages(item.sequence, item.n_tokens)
            except OutOfPages:
                continue  # a fork took the room; the scheduler comes back to this sequence
            yield from self.isolated([item], run, fail)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence at any stage and release its pages."""
        if sequence.table is not None:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on where `parent` stands: at once, sharing its pages, or later through the prefix cache."""
        if parent.table is not None and len(self.running) < self._max_num_seqs:
            try:
                child.table = self._cache.fork(parent.table)
            except OutOfPages:
                pass
            else:
                self.running.insert(self.running.index(parent) + 1, child)
                return
        self.waiting.appendleft(child)

    def _reserve(self, sequence: Sequence, n_tokens: int, step: list[ScheduledSequence]) -> bool:
        """Reserve, preempting younger sequences as needed; False if `sequence` itself had to go."""
        while (shortage := self._take_pages(sequence, n_tokens)) is not None:
            # At a tenant's cap it is one of its own that has to go.
            victim = next(s for s in reversed(self.running) if shortage.tenant in (None, s.request.message.tenant))
            self._preempt(victim)
            step[:] = [item for item in step if item.sequence is not victim]
            if victim is sequence:
                return False
        return True

    def _take_pages(self, sequence: Sequence, n_tokens: int) -> OutOfPages | None:
        """Pages for a sequence's next tokens, or why there are none. What has to be evicted for them is on its account;
        where it is the only one that could give way, pins do."""
        while True:
            try:
                self._reserve_pages(sequence, n_tokens)
                return None
            except OutOfPages as error:
                mates = [s for s in self.running if error.tenant in (None, s.request.message.tenant)]
                if mates != [sequence] or self._pins is None or not self._pins.give_way(error.tenant):
                    return error

    def _reserve_pages(self, sequence: Sequence, n_tokens: int) -> None:
        assert sequence.table is not None
        before = self._cache.tree.evicted_pages
        try:
            self._cache.reserve(sequence.table, n_tokens)
        finally:
            evicted = self._cache.tree.evicted_pages - before
            sequence.request.evicted_tokens += evicted * self._cache.page_size

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self._cache.rollback(sequence.table)
        self._cache.release(sequence.table)
        sequence.table = None
        self.running.remove(sequence)
        self._releases += 1

    def _has_room(self, sequence: Sequence, table: BlockTable) -> bool:
        """Whether starting now, with what the prefix tree gave to `table`, is likely to get somewhere.

        A newcomer needs room for the rest of its prompt beside a page for everyone who runs. One that was preempted
        waits for more, at each preemption for four times as much (see `_to_grow`), so that it is not preempted often;
        but not for all that everyone could ever need, for which everybody behind would wait too.
        """
        if not self.running:
            return True
        need = self._to_grow(sequence, table, sequence)
        for other in self.running:
            assert other.table is not None
            need.update(self._to_grow(other, other.table, sequence))
        return self._cache.has_room(need, sequence.request.message.tenant)

    def _is_within_cap(self, sequence: Sequence, table: BlockTable) -> bool:
        """The same question of the tenant's cap, beside its own sequences that run."""
        tenant = sequence.request.message.tenant
        need = self._to_grow(sequence, table, sequence)
        own = [other for other in self.running if other.request.message.tenant == tenant]
        for other in own:
            assert other.table is not None
            need.update(self._to_grow(other, other.table, sequence))
        return not own or self._cache.within_cap(need, tenant)

    def _to_grow(self, sequence: Sequence, table: BlockTable, newcomer: Sequence) -> Counter[int]:
        """Pages that a sequence is to have room for before the newcomer may start: its tokens' and one more, or
        PREEMPTED_PAGES more for a newcomer that was preempted once, four times those if twice ..., but no more than the
        sequence can ever need."""
        n = newcomer.preemptions
        pages = PREEMPTED_PAGES * 4 ** (n - 1) if n else 1
        total = min(len(sequence.tokens) + pages * self._cache.page_size, max(sequence.max_total_tokens(), 1))
        return self._cache.more_pages(table, total if n else len(sequence.tokens) + self._cache.page_size)

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing pages of this one's prompt that nobody has published yet.

        So of many equal prefixes that arrive together one is computed. Should the leader be cancelled or preempted,
        the next in line leads.
        """
        if not self._cache.prefix_cache or sequence.request.wants_prompt_logprobs:
            return False
        tokens, size = sequence.tokens.view(), self._cache.page_size
        most = 0
        for other in self.running:
            if other.table is None or other.table.identity != self._identity(sequence):
                continue
            # What the leader will publish: its prompt's full pages, as far as they are this one's too.
            n = min(other.request.n_prompt, len(tokens) - 1) // size * size
            if n <= max(most, other.num_computed_tokens):
                continue
            different = np.flatnonzero(other.tokens.view()[:n] != tokens[:n])
            shared = (int(different[0]) if len(different) else n) // size * size
            if shared > other.num_computed_tokens:
                most = max(most, shared)
        return most > 0 and most > self._cache.find_prefix(self._identity(sequence), tokens, len(tokens) - 1).n_tokens

    def _identity(self, sequence: Sequence) -> PrefixIdentity:
        return self.identity(sequence.request.message.tenant, sequence.request.message.cache_salt)

    def identity(self, tenant: str, salt: str) -> PrefixIdentity:
        """What pages that are computed now are published under."""
        return PrefixIdentity(self._fingerprint, "", self._cache.classes.default_form, "all", tenant, salt)

    def _match_limit(self, sequence: Sequence) -> int:
        """Tokens that a hit may serve. The last one is computed again in any case: its logits choose the next."""
        return 0 if sequence.request.wants_prompt_logprobs else len(sequence.tokens) - 1

    def _admit(self, sequence: Sequence, table: BlockTable, match: Match) -> None:
        request = sequence.request
        sequence.table = table
        self.running.append(sequence)
        if request.num_cached_tokens is not None:
            return  # admitted again (after preemption, or of forked choices): the request's own pages are no hits
        request.num_cached_tokens = match.n_tokens
        request.admitted = time.monotonic()
        limit = self._match_limit(sequence)
        request.miss = find_miss(self._cache, self._ghosts, table.identity, sequence.tokens.view(), match, limit)
        request.sink(Started(request.message.request_id, request.n_prompt, match.n_tokens))
