"""Sampling alone: milliseconds a token, for the step's rows in one call.

    python -m benchmarks.micro_sampling [--threads 2] [--rows 1 16] [--vocab 49152 151936] [--isa auto]

Logits are normal with a spread of 3, a few hundred likely tokens at temperature 1; flatter rows than most models'. The
figure is the median of the repeats over the number of rows. Making the random numbers and arrays in Python is counted.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from octavo.engine.messages import SamplingParams
from octavo.engine.sampler import Sampler, sample
from octavo.ops.cpu import CpuOps

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(),
    "temperature 0.8, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k 40": SamplingParams(top_k=40),
    "min_p 0.05": SamplingParams(min_p=0.05),
}


def measure(ops: CpuOps, params: SamplingParams, rows: int, vocab: int, repeats: int) -> float:
    """Median seconds per row."""
    rng = np.random.default_rng(0)
    samplers = [Sampler(params, 1, i, []) for i in range(rows)]
    seconds = []
    for position in range(repeats):
        logits = 3 * rng.standard_normal((rows, vocab), np.float32)
        start = time.perf_counter()
        sample(ops, logits, [s.draw(logits, i, position) for i, s in enumerate(samplers)])
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=["auto", "portable", "avx2", "avx512"], default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    ops = CpuOps(threads=args.threads, isa=args.isa)
    print(f"{args.threads} threads, {ops.context.isa}; ms a token")
    print(f"{'':28}" + "".join(f"{f'{v:,} x {r}':>15}" for v in args.vocab for r in args.rows))
    for name, params in KINDS.items():
        figures = [1e3 * measure(ops, params, r, v, args.repeats) for v in args.vocab for r in args.rows]
        print(f"{name:28}" + "".join(f"{ms:15.3f}" for ms in figures))


if __name__ == "__main__":
    main()
