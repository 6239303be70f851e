"""Where the bytes of the cache go: what each codec takes per token, and what paging adds.

    python -m benchmarks.memory [--models smollm2-135m,qwen2.5-coder-0.5b] [--tokens 4096]

Bytes per token are counted in an engine that has read a prompt: the bytes of the pages in use, against the formulas in
the codecs' docstrings, which are written out here once more. Waste is then taken
apart for three loads of the cache, kind by kind; the kinds add up to the frames in use, to the byte. llama.cpp's figure
is the size of the buffers that it allocates.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.harness import BenchmarkError, model_path, save, table
from benchmarks.workers import llama_worker, octavo_worker
from octavo.cache.footprint import Footprint, plan
from octavo.cache.format import Form
from octavo.cache.manager import KVCache
from octavo.cache.radix import PrefixIdentity
from octavo.cache.spec import CacheSpec
from octavo.config import EngineConfig
from octavo.models.loading.load import load_model
from octavo.ops.host_store import HostStore

CODECS = ("f32", "f16", "bf16", "int8", "int8/int4", "int4")
LLAMA_CACHES = ("f16", "q8_0", "q4_0")
BUDGET = 1 << 30
#: Length of the prompt by which bytes per token are counted; whole pages, so that none stays open.
PROMPT = 1024


def bits_by_docstring(codec: str, page_size: int, head_dim: int) -> tuple[float, float]:
    """Bits per key and per value, as the codecs' docstrings state them for head_dim a multiple of 64."""
    if head_dim % 64:
        raise BenchmarkError(f"the docstrings state bits for head_dim a multiple of 64, this model has {head_dim}")
    bits = {name: (b, b) for name, b in {"f32": 32.0, "f16": 16.0, "bf16": 16.0}.items()}
    bits |= {name: (b + 32 / min(page_size, 64), b + 32 / 64) for name, b in {"int8": 8, "int4": 4}.items()}
    keys, _, values = codec.partition("/")
    return bits[keys][0], bits[values or keys][1]


@dataclass(frozen=True, slots=True)
class Waste:
    """Bytes of the frames in use, by what they hold. All but `payload` and `open_used` is waste.

    Attributes:
        payload: codes and scales of sealed tokens.
        alignment: between the planes of sealed pages.
        open_used, open_unused: float32 keys and values in open pages, and their empty slots.
        partial_frames: free page slots in frames in use.
        frame_slack: ends of frames that no page fits into.
        total: frames in use.
    """

    tokens: int
    sequences: int
    payload: int
    alignment: int
    open_used: int
    open_unused: int
    partial_frames: int
    frame_slack: int
    total: int

    @property
    def wasted(self) -> int:
        return self.alignment + self.open_unused + self.partial_frames + self.frame_slack


def waste(spec: CacheSpec, page_size: int, codec: str, lengths: Sequence[int]) -> Waste:
    """Fill a real cache with sequences of these lengths, sharing nothing, and take its frames apart."""
    keys, _, values = codec.partition("/")
    form = Form(keys, values or keys)
    footprint = plan(spec, page_size, [form], BUDGET)
    cache = KVCache(footprint, HostStore(footprint.arena_bytes), prefix_cache=False)
    identity = PrefixIdentity((), "", form.name, "all", "", "")
    for length in lengths:
        table = cache.new_table(identity)
        tokens = np.zeros(length, dtype=np.int32)
        # As an engine does it: a long prompt in chunks, so that pages are allocated in the same order.
        for start in range(0, length, EngineConfig().step_tokens):
            n = min(EngineConfig().step_tokens, length - start)
            cache.reserve(table, n)
            cache.commit(table, tokens, n)
    return _taken_apart(footprint, cache, lengths)


def _taken_apart(footprint: Footprint, cache: KVCache, lengths: Sequence[int]) -> Waste:
    parts: Counter[str] = Counter()
    for page_class in footprint.classes:
        usage, payload = cache.arena.usage(page_class.index), page_class.format.payload_bytes
        pages = usage.active + usage.cached
        if page_class.is_open:
            used = sum(n % footprint.page_size for n in lengths) * (payload // footprint.page_size)
            parts.update(open_used=used, open_unused=pages * page_class.page_bytes - used)
        else:
            parts.update(payload=pages * payload, alignment=pages * (page_class.page_bytes - payload))
        parts.update(partial_frames=usage.free * page_class.page_bytes, frame_slack=usage.frame_slack_bytes)
    result = Waste(
        tokens=sum(lengths),
        sequences=len(lengths),
        total=(cache.arena.n_frames - cache.arena.free_frames) * footprint.frame_bytes,
        **parts,
    )
    if result.payload + result.open_used + result.wasted != result.total:
        raise BenchmarkError(f"the parts do not add up to the frames in use: {result}")
    return result


def bytes_per_token(model: str, spec: CacheSpec, codec: str, threads: int, backend: str) -> dict[str, float]:
    """In a running engine, against the docstring's formula."""
    page_size = EngineConfig().page_size
    with octavo_worker() as worker:
        worker.call(
            "load", model=str(model_path(model)), cache=codec, threads=threads, n_ctx=PROMPT + 1, backend=backend
        )
        held = worker.call("read", tokens=list(range(PROMPT)))
    if held["sealed_pages"] * page_size != PROMPT:
        raise BenchmarkError(f"{held['sealed_pages']} pages of {page_size} hold {PROMPT} tokens")
    key_bits, value_bits = bits_by_docstring(codec, page_size, spec.groups[0].planes(page_size)[0].head_dim)
    stated = (key_bits + value_bits) / 2 * spec.values_per_token / 8
    return {
        "stated": stated,
        "allocated": held["used_bytes"] / PROMPT,
    }


def llama_bytes_per_token(model: str, cache: str, n_ctx: int, threads: int) -> float:
    with llama_worker() as worker:
        loaded = worker.call("load", model=str(model_path(model)), cache=cache, threads=threads, n_ctx=n_ctx)
    return float(loaded["kv_bytes"] / loaded["n_ctx"])


def loads(n_tokens: int) -> dict[str, list[int]]:
    """Name -> sequence lengths: one ends in the middle of a page, as the average one does."""
    half = EngineConfig().page_size // 2
    return {
        "one sequence": [n_tokens + half],
        "eight sequences": [n_tokens + half] * 8,
        "sixteen short ones": [n_tokens // 16 + half] * 16,
    }


def measure(model: str, n_tokens: int, threads: int, backend: str, peer: bool) -> dict[str, Any]:
    spec = load_model(str(model_path(model))).spec.cache_spec()
    page_size = EngineConfig().page_size
    return {
        "per_token": {codec: bytes_per_token(model, spec, codec, threads, backend) for codec in CODECS},
        "llama.cpp": {c: llama_bytes_per_token(model, c, n_tokens, threads) for c in LLAMA_CACHES} if peer else {},
        "waste": {
            codec: {
                name: asdict(w) | {"wasted": w.wasted}
                for name, lengths in loads(n_tokens).items()
                for w in [waste(spec, page_size, codec, lengths)]
            }
            for codec in ("f16", "int8", "int4")
        },
        "values_per_token": spec.values_per_token,
    }


def markdown_per_token(result: dict[str, Any]) -> str:
    rows = []
    for codec, entry in result["per_token"].items():
        bits = 8 * entry["allocated"] / result["values_per_token"]
        rows.append([f"Octavo {codec}", f"{entry['stated']:,.1f}", f"{entry['allocated']:,.1f}", f"{bits:.3f}"])
    for cache, found in result["llama.cpp"].items():
        rows.append([f"llama.cpp {cache}", "", f"{found:,.0f}", f"{8 * found / result['values_per_token']:.3f}"])
    return table(["cache", "bytes per token, stated", "allocated", "bits per value"], rows)


def markdown_waste(result: dict[str, Any]) -> str:
    rows = []
    for codec, by_load in result["waste"].items():
        for name, w in by_load.items():
            parts = [w[k] for k in ("alignment", "open_unused", "partial_frames", "frame_slack")]
            rows.append([
                f"{codec}, {name}", f"{w['tokens']:,}", _mb(w["total"]), _mb(w["payload"]), _mb(w["open_used"]),
                *(f"{p / w['total']:.2%}" for p in parts), f"{w['wasted'] / w['total']:.2%}",
            ])  # fmt: skip
    header = ["load", "tokens", "frames, MB", "sealed, MB", "open, MB", "alignment", "open slots", "partial frames",
              "frame ends", "waste in all"]  # fmt: skip
    return table(header, rows)


def _mb(n: int) -> str:
    return f"{n / 1e6:,.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="cpu", choices=["cpu", "reference"])
    parser.add_argument("--no-peers", action="store_true", help="leave llama.cpp out")
    args = parser.parse_args()
    results = {}
    for model in args.models.split(","):
        results[model] = measure(model, args.tokens, args.threads, args.backend, not args.no_peers)
        print(f"\n{model}\n{markdown_per_token(results[model])}\n\n{markdown_waste(results[model])}", flush=True)
    print(f"\nwritten to {save('memory', {'tokens': args.tokens}, results)}")


if __name__ == "__main__":
    main()
