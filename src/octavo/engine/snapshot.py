"""The engine's state as figures and as a map of pages."""

from __future__ import annotations

import numpy as np

from octavo.cache.arena import ArenaSnapshot
from octavo.cache.classes import PageClasses
from octavo.cache.manager import KVCache
from octavo.cache.receipt import ReceiptTotals
from octavo.engine.client import EngineStats, FrameMap, PageCounts
from octavo.engine.scheduler import Scheduler


def engine_stats(
    cache: KVCache,
    scheduler: Scheduler,
    totals: ReceiptTotals,
    *,
    generation_tokens: int,
    cascade_refused: int,
    steps: int,
) -> EngineStats:
    """Taken on the engine's thread, between steps."""
    counts = cache.stats()
    groups = cache.groups
    return EngineStats(
        requests_running=len(scheduler.running),
        requests_waiting=len(scheduler.waiting),
        pages=tuple(
            PageCounts(groups[c.group].name, c.form, c.is_open, usage.active, usage.cached, usage.free)
            for c, usage in zip(cache.classes, counts.usage, strict=True)
        ),
        frames_total=counts.frames_total,
        frames_free=counts.frames_free,
        frame_bytes=counts.frame_bytes,
        kv_used_bytes=counts.used_bytes,
        kv_total_bytes=counts.frames_total * counts.frame_bytes,
        hit_tokens=totals.hit_tokens,
        query_tokens=totals.query_tokens,
        prompt_tokens=totals.prompt_tokens,
        generation_tokens=generation_tokens,
        preemptions=scheduler.preemptions,
        evicted_pages=counts.evicted_pages,
        misses=tuple(sorted(totals.misses.items())),
        cascade_refused=cascade_refused,
        steps=steps,
    )


def page_map(arena: ArenaSnapshot, classes: PageClasses) -> list[FrameMap]:
    """Every frame, in order, with the state of each of its slots (see `FrameMap`). Needs the snapshot alone, so that
    the engine's thread need not wait for it."""
    per_frame = np.array([arena.frame_bytes // n_bytes for n_bytes in arena.class_bytes], dtype=np.int64)
    widths = np.where(arena.frame_class < 0, 0, per_frame[arena.frame_class])
    starts = np.concatenate([[0], np.cumsum(widths)])
    letters = np.full(int(starts[-1]), ord("f"), dtype=np.uint8)

    live = np.flatnonzero(arena.offsets >= 0)
    frame, within = np.divmod(arena.offsets[live], arena.frame_bytes)
    page_class = arena.frame_class[frame]
    slot = within // np.array(arena.class_bytes, dtype=np.int64)[page_class]
    readers = arena.ref_count[live] - arena.published[live]
    is_open = np.array([c.is_open for c in classes])[page_class]
    state = np.select([is_open, readers == 0, readers == 1], [ord("o"), ord("c"), ord("a")], ord("s"))
    letters[starts[frame] + slot] = state

    text = letters.tobytes().decode("ascii")
    bounds, kinds = starts.tolist(), arena.frame_class.tolist()
    return [
        FrameMap(None if kind < 0 else kind, text[start:stop])
        for kind, start, stop in zip(kinds, bounds, bounds[1:], strict=False)
    ]
