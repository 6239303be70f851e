"""The engine's state as figures and as a map of pages. Taken on the engine's thread, between steps."""

from __future__ import annotations

from octavo.cache.manager import KVCache
from octavo.cache.pages import OPEN
from octavo.engine.client import EngineStats
from octavo.engine.scheduler import Scheduler


def engine_stats(
    cache: KVCache, scheduler: Scheduler, *, prompt_tokens: int, generation_tokens: int, steps: int
) -> EngineStats:
    counts = cache.stats()
    return EngineStats(
        requests_running=len(scheduler.running),
        requests_waiting=len(scheduler.waiting),
        sealed_pages_active=counts.sealed_active,
        sealed_pages_cached=counts.sealed_cached,
        sealed_pages_free=counts.sealed_free,
        open_pages_active=counts.open_active,
        open_pages_free=counts.open_free,
        frames_total=counts.frames_total,
        frames_free=counts.frames_free,
        frame_bytes=counts.frame_bytes,
        kv_used_bytes=counts.used_bytes,
        kv_total_bytes=counts.frames_total * counts.frame_bytes,
        hit_tokens=scheduler.hit_tokens,
        query_tokens=scheduler.query_tokens,
        prompt_tokens=prompt_tokens,
        generation_tokens=generation_tokens,
        preemptions=scheduler.preemptions,
        evicted_pages=counts.evicted_pages,
        steps=steps,
    )


def page_map(cache: KVCache) -> list[dict[str, object]]:
    """Every frame, in order, with the state of each of its slots (see `EngineClient.page_map`)."""
    in_tree = {node.page.handle: node.page.ref_count for node in cache.tree.nodes()}
    result: list[dict[str, object]] = []
    for frame in cache.arena.layout():
        if frame is None:
            result.append({"class": None, "pages": []})
            continue
        page_class, handles = frame
        is_open = page_class == OPEN
        states = [_state(handle, is_open, in_tree) for handle in handles]
        result.append({"class": "open" if is_open else "sealed", "pages": states})
    return result


def _state(handle: int | None, is_open: bool, in_tree: dict[int, int]) -> str:
    if handle is None:
        return "free"
    if is_open:
        return "open"
    # The tree is one holder of a published page; each block table that reads it is another.
    holders = in_tree.get(handle, 2)
    return "cached" if holders == 1 else "active" if holders == 2 else "shared"
