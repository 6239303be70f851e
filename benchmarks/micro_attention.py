"""Attention over sealed pages alone: the time that a decode step and a prefill chunk spend in it.

    python benchmarks/micro_attention.py [--threads 2] [--codecs f32 f16 int8 int4] [--shape smollm2]

Decode: one token behind 128, 2,048 and 8,000 tokens, all layers; milliseconds, and page bytes read per second.
Prefill: 512 tokens behind 0 and 8,000, one layer; operations per second (two per multiply-add; a query head
does two multiply-adds per token and channel, one for the score and one for the value). Figures are the best of
the repeats, since other load only adds time; with --cpu-time, the processor time of one thread, which other
load hardly touches.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import octavo.ops._cpu as _cpu

from octavo.cache.format import Form, PageFormat, build_format, open_format
from octavo.cache.spec import FullGroup
from octavo.codecs.base import Role
from octavo.ops.base import SPLIT_PAGES


@dataclass(frozen=True)
class Shape:
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int


SHAPES = {
    "smollm2": Shape(30, 9, 3, 64),
    "qwen2.5-0.5b": Shape(24, 14, 2, 64),
    "llama-8b": Shape(8, 32, 8, 128),
    "mha": Shape(8, 16, 16, 64),
}
PAGE_SIZE = 32


def planes(fmt: PageFormat) -> tuple[list[Any], list[Any], int]:
    def entries(side: Any) -> list[Any]:
        return [(p.codec.kernel_id, p.codec.rotates(p.plane), p.offset) for p in side]

    return entries(fmt.planes[Role.KEY]), entries(fmt.planes[Role.VALUE]), fmt.page_bytes


class Bench:
    def __init__(self, shape: Shape, codec: str, tokens: int, threads: int, isa: str) -> None:
        self.shape = shape
        group = FullGroup(tuple(range(shape.n_layers)), shape.n_kv_heads, shape.head_dim)
        self.fmt, open_fmt = build_format(group, PAGE_SIZE, Form(codec, codec)), open_format(group, PAGE_SIZE)
        self.context = _cpu.Context(threads, isa)
        group = shape.n_heads // shape.n_kv_heads
        self.cache = _cpu.CacheLayout(
            self.context,
            PAGE_SIZE,
            shape.n_kv_heads,
            shape.head_dim,
            group,
            SPLIT_PAGES,
            *planes(open_fmt),
        )
        self.cache.add_format(self.context, *planes(self.fmt))
        self.n_pages = tokens // PAGE_SIZE
        n_bytes = self.n_pages * self.fmt.page_bytes + open_fmt.page_bytes
        mapped = mmap.mmap(-1, n_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # as the arena does
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = np.frombuffer(mapped, np.uint8)
        rng = np.random.default_rng(0)
        self.offsets = rng.permutation(self.n_pages).astype(np.int64) * self.fmt.page_bytes
        page = np.zeros(self.fmt.page_bytes, np.uint8)
        for placed in self.fmt.all_planes():
            x = rng.standard_normal((PAGE_SIZE, shape.n_kv_heads, shape.head_dim)).astype(np.float32)
            to = page[placed.offset : placed.offset + placed.n_bytes]
            is_key = placed.plane.role is Role.KEY
            rotated = placed.codec.rotates(placed.plane)
            _cpu.encode_plane(self.context, placed.codec.kernel_id, is_key, rotated, x, to)
        for offset in self.offsets:
            self.memory[offset : offset + page.size] = page
        self.rng = rng

    def run(self, prefix: int, rows: int, layers: int, repeats: int, clock: Callable[[], float]) -> float:
        """Best seconds for `rows` tokens behind `prefix`, over `layers` layers."""
        shape = self.shape
        n_entries = (prefix + rows) // PAGE_SIZE
        step = _cpu.Step(self.cache)
        step.assign(
            self.context,
            self.memory,
            np.array([0, rows], np.int32),
            np.array([prefix], np.int32),
            np.array([0, 1], np.int32),
            np.array([0, n_entries], np.int32),
            self.offsets[:n_entries],
            np.zeros(n_entries, np.uint8),
            np.arange(n_entries, dtype=np.int32) * PAGE_SIZE,
            np.full(n_entries, PAGE_SIZE, np.int32),
            np.array([self.n_pages * self.fmt.page_bytes], np.int64),
            np.ones((prefix + rows, shape.head_dim // 2), np.float32),
            np.zeros((prefix + rows, shape.head_dim // 2), np.float32),
        )
        width = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
        qkv = self.rng.standard_normal((rows, width)).astype(np.float32)
        out = np.empty((rows, shape.n_heads * shape.head_dim), np.float32)
        best = float("inf")
        for _ in range(repeats + 1):
            start = clock()
            for layer in range(layers):
                _cpu.attend(self.context, step, layer, shape.head_dim**-0.5, qkv, out)
            best = min(best, clock() - start)
        return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", default=["f32", "f16", "int8", "int4"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--cpu-time", action="store_true", help="needs --threads 1")
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1")
    clock = time.thread_time if args.cpu_time else time.perf_counter
    shape = SHAPES[args.shape]
    print(f"{args.shape}, {shape}, {args.threads} threads, page size {PAGE_SIZE}")
    for codec in args.codecs:
        bench = Bench(shape, codec, 8000 + 512 + PAGE_SIZE, args.threads, args.isa)
        line = [f"{codec:5}"]
        for prefix in (128, 2048, 8000):
            seconds = bench.run(prefix, 1, shape.n_layers, args.repeats, clock)
            n_bytes = prefix // PAGE_SIZE * bench.fmt.payload_bytes
            line.append(f"decode {prefix}: {seconds * 1e3:6.2f} ms {n_bytes / seconds / 1e9:5.1f} GB/s")
        for prefix in (0, 8000):
            seconds = bench.run(prefix, 512, 1, max(1, args.repeats // 2), clock)
            pairs = shape.n_heads * (512 * prefix + 512 * 513 // 2)
            gflops = 4 * pairs * shape.head_dim / seconds / 1e9
            line.append(f"prefill {prefix}: {seconds * 1e3:6.1f} ms {gflops:5.1f} GFLOP/s")
        print(" | ".join(line), flush=True)


if __name__ == "__main__":
    main()
