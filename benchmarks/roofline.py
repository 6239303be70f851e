"""Each kernel's achieved rate beside the two ceilings measured in the same run: read bandwidth and arithmetic.

    python -m benchmarks.roofline [--threads 2] [--shape smollm2] [--repeats 7] [--quick]

Ceilings: all threads read a buffer of 256 MiB in huge pages; all threads do multiply-adds on registers, in float32, in
integers of 16 bits and of 8 bits, with 32-bit sums. Kernels take turns with the ceilings, so that a machine that slows
down slows both. A decode step's attention and linear layers are counted by the bytes that they must read, prefill by
its operations, two per multiply-add. Quantized linear layers and attention over int8 and int4 pages multiply 16-bit
integers (why: docs/benchmarks.md); their share of the 8-bit peak is given too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import octavo.ops._cpu as _cpu

from benchmarks import micro_attention, micro_linear
from benchmarks.harness import save, spread, table

CODECS = ("f16", "int8", "int4")
DECODE_CONTEXT = 8000
PREFILL_ROWS = 512
PREFILL_CONTEXT = 4096


@dataclass
class Kernel:
    """Attributes:
    run: does the work once, gives seconds.
    n_bytes, operations: what it must read and do.
    units: the arithmetic that it is measured against, "f32" or "i16".
    rates: of each turn, in 1e9 per second: bytes, operations.
    """

    name: str
    run: Callable[[], float]
    n_bytes: int
    operations: int
    units: str
    rates: list[tuple[float, float]] = field(default_factory=list)


def attention_kernels(shape: micro_attention.Shape, threads: int) -> list[Kernel]:
    kernels = []
    for codec in CODECS:
        bench = micro_attention.Bench(shape, codec, DECODE_CONTEXT + micro_attention.PAGE_SIZE, threads, "auto")
        pages = DECODE_CONTEXT // micro_attention.PAGE_SIZE
        per_token = 4 * shape.n_heads * shape.head_dim  # of one layer: a score and a value, two operations each
        units = "i16" if codec.startswith("int") else "f32"
        kernels.append(Kernel(
            f"attention, decode at {DECODE_CONTEXT:,}, {codec}",
            lambda bench=bench: bench.run(DECODE_CONTEXT, 1, shape.n_layers, 0, time.perf_counter),  # type: ignore[misc]
            pages * bench.fmt.payload_bytes, per_token * DECODE_CONTEXT * shape.n_layers, units,
        ))  # fmt: skip
        pairs = PREFILL_ROWS * PREFILL_CONTEXT + PREFILL_ROWS * (PREFILL_ROWS + 1) // 2
        kernels.append(Kernel(
            f"attention, {PREFILL_ROWS} tokens behind {PREFILL_CONTEXT:,}, {codec}",
            lambda bench=bench: bench.run(PREFILL_CONTEXT, PREFILL_ROWS, 1, 0, time.perf_counter),  # type: ignore[misc]
            PREFILL_CONTEXT // micro_attention.PAGE_SIZE * bench.fmt.payload_bytes // shape.n_layers,
            per_token * pairs, units,
        ))  # fmt: skip
    return kernels


def linear_kernels(shape: micro_linear.Shape, threads: int) -> list[Kernel]:
    bench = micro_linear.Bench(shape, threads, "auto")

    def seconds(rows: int) -> float:
        return sum(part for part, _, _ in bench.measure(rows, 1).values())

    kernels = []
    for rows in (1, 64, PREFILL_ROWS):
        _, sizes, operations = zip(*bench.measure(rows, 1).values(), strict=True)
        kernels.append(Kernel(
            f"linear layers and head, {rows} rows", lambda rows=rows: seconds(rows),  # type: ignore[misc]
            sum(sizes), sum(operations), "i16",
        ))  # fmt: skip
    return kernels


def run(shape: str, threads: int, repeats: int) -> dict[str, Any]:
    context = _cpu.Context(threads, "auto")
    kernels = [
        *attention_kernels(micro_attention.SHAPES[shape], threads),
        *linear_kernels(micro_linear.SHAPES[shape], threads),
    ]
    ceilings: dict[str, list[float]] = {"read": [], "f32": [], "i16": [], "i8": []}
    for turn in range(repeats + 1):
        measured = {"read": max(_cpu.read_bandwidth(context, repeats=3))}
        for units in ("f32", "i16", "i8"):
            measured[units] = max(_cpu.peak_arithmetic(context, units, repeats=3))
        if turn:  # the first turn warms up
            for name, value in measured.items():
                ceilings[name].append(value)
        for kernel in kernels:
            seconds = kernel.run()
            if turn:
                kernel.rates.append((kernel.n_bytes / seconds / 1e9, kernel.operations / seconds / 1e9))
    return {
        "isa": context.isa,
        "ceilings": {name: spread(values) for name, values in ceilings.items()},
        "kernels": [summary(kernel, ceilings) for kernel in kernels],
    }


def summary(kernel: Kernel, ceilings: dict[str, list[float]]) -> dict[str, Any]:
    """Shares are formed turn by turn."""

    def share(of: str, which: int) -> float:
        pairs = zip(kernel.rates, ceilings[of], strict=True)
        return statistics.median(rates[which] / ceiling for rates, ceiling in pairs)

    return {
        "name": kernel.name,
        "units": kernel.units,
        "read": spread([r for r, _ in kernel.rates]),
        "arithmetic": spread([a for _, a in kernel.rates]),
        "share": {"read": share("read", 0), kernel.units: share(kernel.units, 1), "i8": share("i8", 1)},
    }


def markdown(results: dict[str, Any]) -> str:
    names = {"read": "reading, GB/s", "f32": "float32, GOP/s", "i16": "16-bit integers, GOP/s",
             "i8": "8-bit integers, GOP/s"}  # fmt: skip
    ceilings = table(
        ["ceiling", "measured"],
        [[names[k], f"{s['median']:.1f} ({s['low']:.1f}-{s['high']:.1f})"] for k, s in results["ceilings"].items()],
    )
    rows = []
    for kernel in results["kernels"]:
        share, units = kernel["share"], kernel["units"]
        binds = "read" if share["read"] > share[units] else units
        rows.append([
            kernel["name"], f"{kernel['read']['median']:.1f}", f"{share['read']:.0%}",
            f"{kernel['arithmetic']['median']:.0f}", f"{share[units]:.0%} of {units}", f"{share['i8']:.0%}",
            {"read": "reading", "f32": "float32", "i16": "16-bit integers"}[binds],
        ])  # fmt: skip
    header = ["kernel", "GB/s", "of reading", "GOP/s", "of its arithmetic", "of 8-bit", "nearest ceiling"]
    return f"{ceilings}\n\n{table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--shape", choices=sorted(micro_linear.SHAPES.keys() & micro_attention.SHAPES), default="smollm2"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two repeats: a look, not a figure")
    args = parser.parse_args()
    results = run(args.shape, args.threads, 2 if args.quick else args.repeats)
    print(markdown(results))
    settings = {"shape": args.shape, "threads": args.threads, "repeats": args.repeats, "quick": args.quick}
    print(f"\nwritten to {save('roofline', settings, results)}")


if __name__ == "__main__":
    main()
