"""What the cache's books cost at 100,000 pages: no kernel runs, so these times are all Python's.

    python -m benchmarks.micro_cache [--pages 100000] [--repeats 9]

- match: the pages of a 256k-token prompt that is cached whole, found, locked and held, and let go again.
- upkeep: reserve and commit of one decoded token for each of 16 sequences, the mean over a page's tokens, so that one
  step in 32 seals, publishes and evicts a page of each.
- snapshot: what an open page in a browser costs the engine's thread (it copies the books); drawing: what the map costs
  the thread that answers the browser.
- evict: one page.

Medians of `repeats`, with their range.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from octavo.cache.classes import PageClasses
from octavo.cache.footprint import Footprint
from octavo.cache.format import Form
from octavo.cache.manager import KVCache
from octavo.cache.radix import PrefixIdentity
from octavo.cache.spec import CacheSpec, FullGroup
from octavo.engine.snapshot import page_map
from octavo.ops.host_store import HostStore

PAGE = 32
PROMPT = 256 * 1024
SEQUENCES = 16


def timed(function: Callable[[], object], repeats: int) -> str:
    """Milliseconds: median and range."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return f"{median(times):9.3f} ms   ({min(times):.3f} to {max(times):.3f})"


def filled_cache(n_pages: int) -> tuple[KVCache, PrefixIdentity, np.ndarray]:
    """A cache of n_pages, nearly all of them cached: one prompt of 256k tokens, and many of 64 pages."""
    classes = PageClasses(CacheSpec((FullGroup((0,), 1, 8),)), PAGE, [Form("int8", "int8")])
    frame = classes.opened(0).page_bytes
    sizes = Footprint(classes, frame, -(-n_pages // (frame // classes.sealed(0, "int8").page_bytes)))
    cache = KVCache(sizes, HostStore(sizes.arena_bytes))
    identity = PrefixIdentity(("benchmark",), "", "int8", "all", "", "")
    rng = np.random.default_rng(0)
    long = rng.integers(0, 50_000, PROMPT, dtype=np.int32)
    prompts = [long]
    per_frame = sizes.per_frame(classes.sealed(0, "int8"))
    left = sizes.n_frames * per_frame - PROMPT // PAGE - SEQUENCES * per_frame
    prompts += [rng.integers(0, 50_000, 64 * PAGE, dtype=np.int32) for _ in range(left // 64)]
    for tokens in prompts:
        table = cache.new_table(identity)
        cache.reserve(table, len(tokens))
        cache.commit(table, tokens, len(tokens))
        cache.release(table)
    return cache, identity, long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    cache, identity, long = filled_cache(args.pages)
    cached = sum(usage.cached for usage in cache.stats().usage)
    print(f"{cached:,} pages of {PAGE} tokens cached, {cache.tree.n_nodes:,} nodes")

    def match() -> None:
        table = cache.new_table(identity)
        assert cache.match_prefix(table, long, len(long)).n_tokens == PROMPT
        cache.release(table)

    print("match of 256k tokens  ", timed(match, args.repeats))

    tables = [cache.new_table(identity) for _ in range(SEQUENCES)]
    texts = [np.full(1 << 16, i, dtype=np.int32) for i in range(SEQUENCES)]

    def decode() -> None:
        for table, tokens in zip(tables, texts, strict=True):
            cache.reserve(table, 1)
            cache.commit(table, tokens, 1)

    def a_page_of_steps() -> None:
        for _ in range(PAGE):
            decode()

    a_page_of_steps()
    print(f"upkeep, {PAGE} steps of {SEQUENCES}", timed(a_page_of_steps, args.repeats), f" / {PAGE} steps")
    print("snapshot              ", timed(cache.arena.snapshot, args.repeats))
    snapshot = cache.arena.snapshot()
    print("drawing the map       ", timed(lambda: page_map(snapshot, cache.classes), args.repeats))
    print("evict one page        ", timed(cache.tree.evict_one, args.repeats))


if __name__ == "__main__":
    main()
