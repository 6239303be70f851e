"""Linear layers alone: the time that a step of 1, 8, 64 and 512 rows spends in them, beside read bandwidth.

    python benchmarks/micro_linear.py [--threads 2] [--shape smollm2] [--rows 1 8 64 512] [--type Q4_1]

All layers of the shape are allocated with random weights, so that a step at one row reads them from memory as a
real one does. GB/s counts weight bytes in kernel order (what must be read); GOP/s counts two operations per
multiply-add. The head computes one row, as a decode step does. Figures are the best of the repeats, since other load
only adds time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import octavo.ops._cpu as _cpu


@dataclass(frozen=True)
class Shape:
    n_layers: int
    d_model: int
    qkv: int
    o: int
    d_ff: int
    vocab: int
    layer_type: str
    head_type: str


SHAPES = {
    "smollm2": Shape(30, 576, 960, 576, 1536, 49152, "Q4_1", "Q8_0"),
    "qwen2.5-0.5b": Shape(24, 896, 1152, 896, 4864, 151936, "Q5_0", "Q8_0"),
    "llama-1b": Shape(16, 2048, 3072, 2048, 8192, 128256, "Q4_K", "Q6_K"),
}

#: Stored type -> (inputs, bytes) of a block, offsets of its f16 scales.
BLOCKS = {
    "F32": (1, 4, ()),
    "F16": (1, 2, (0,)),
    "BF16": (1, 2, ()),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}


def random_weight(dtype: str, rows: int, cols: int, rng: np.random.Generator) -> Any:
    """Random codes under small scales."""
    block, size, scales = BLOCKS[dtype]
    if dtype in ("F32", "BF16"):
        data = rng.standard_normal((rows, cols), np.float32).view(np.uint8)
        data = data if dtype == "F32" else data.reshape(-1, 4)[:, 2:]
    else:
        data = rng.integers(0, 256, (rows * cols // block, size), dtype=np.uint8)
        for offset in scales:
            data[:, offset : offset + 2] = np.array([0.01], np.float16).view(np.uint8)
    return _cpu.Stored("random", dtype, rows, cols, np.ascontiguousarray(data).reshape(-1), None)


class Bench:
    def __init__(self, shape: Shape, threads: int, isa: str) -> None:
        self.shape = shape
        self.context = _cpu.Context(threads, isa)
        rng = np.random.default_rng(0)
        d, layer = shape.d_model, shape.layer_type
        self.norm = np.ones(d, np.float32)

        def linear(rows: int, cols: int) -> Any:
            return _cpu.Linear(self.context, [random_weight(layer, rows, cols, rng)])

        self.qkv = [linear(shape.qkv, d) for _ in range(shape.n_layers)]
        self.o = [linear(d, shape.o) for _ in range(shape.n_layers)]
        self.mlp = [
            _cpu.Mlp(
                self.context,
                self.norm,
                1e-5,
                random_weight(layer, shape.d_ff, d, rng),
                random_weight(layer, shape.d_ff, d, rng),
                random_weight(layer, d, shape.d_ff, rng),
            )
            for _ in range(shape.n_layers)
        ]
        self.head = _cpu.Head(self.context, self.norm, 1e-5, random_weight(shape.head_type, shape.vocab, d, rng))

    def measure(self, rows: int, repeats: int) -> dict[str, tuple[float, int, int]]:
        """part -> (seconds, weight bytes, operations) of one step."""
        shape, context = self.shape, self.context
        rng = np.random.default_rng(1)
        hidden = rng.standard_normal((rows, shape.d_model), np.float32)
        mixed = rng.standard_normal((rows, shape.o), np.float32)
        qkv = np.empty((rows, shape.qkv), np.float32)
        logits = np.empty((1, shape.vocab), np.float32)
        first = np.zeros(1, np.int32)

        def run_qkv() -> None:
            for layer in self.qkv:
                _cpu.linear(context, layer, hidden, qkv, self.norm, 1e-5)

        def run_o() -> None:
            for layer in self.o:
                _cpu.linear(context, layer, mixed, hidden, add=True)

        def run_mlp() -> None:
            for layer in self.mlp:
                layer.run(context, hidden)

        def run_head() -> None:
            self.head.run(context, hidden, first, logits)

        d, n = shape.d_model, shape.n_layers
        parts: dict[str, tuple[Callable[[], None], int, int]] = {
            "qkv": (run_qkv, packed(self.qkv), 2 * n * rows * d * shape.qkv),
            "o": (run_o, packed(self.o), 2 * n * rows * d * shape.o),
            "mlp": (run_mlp, packed(self.mlp), 6 * n * rows * d * shape.d_ff),
            "head": (run_head, self.head.packed_bytes, 2 * d * shape.vocab),
        }
        start = hidden.copy()
        best = dict.fromkeys(parts, float("inf"))
        for _ in range(repeats):  # parts in turn, as a step runs them: each finds the caches as the others left them
            for name, (run, _, _) in parts.items():
                hidden[:] = start
                begin = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - begin)
        return {name: (best[name], size, operations) for name, (_, size, operations) in parts.items()}


def packed(layers: list[Any]) -> int:
    return sum(layer.packed_bytes for layer in layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--type", choices=BLOCKS, help="weight type of the layers instead of the shape's own")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--seconds", type=float, default=3.0, help="time to spend on each number of rows, about")
    args = parser.parse_args()

    shape = SHAPES[args.shape]
    if args.type:
        shape = Shape(**{**shape.__dict__, "layer_type": args.type})
    bench = Bench(shape, args.threads, args.isa)
    bandwidth = max(_cpu.read_bandwidth(bench.context))
    print(
        f"{args.shape}, {shape.layer_type} layers, {shape.head_type} head, {args.threads} threads, {bench.context.isa}"
    )
    print(f"read bandwidth {bandwidth:.1f} GB/s")
    print(f"{'rows':>5} {'part':>5} {'ms':>9} {'GB/s':>7} {'GOP/s':>7}")
    for rows in args.rows:
        once = sum(seconds for seconds, _, _ in bench.measure(rows, 1).values())
        figures = bench.measure(rows, max(2, int(args.seconds / once)))
        figures["all"] = tuple(map(sum, zip(*figures.values(), strict=True)))  # type: ignore[assignment]
        for part, (seconds, size, operations) in figures.items():
            print(
                f"{rows:5} {part:>5} {seconds * 1e3:9.3f} {size / seconds / 1e9:7.1f} {operations / seconds / 1e9:7.1f}"
            )


if __name__ == "__main__":
    main()
