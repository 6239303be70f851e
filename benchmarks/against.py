"""This checkout against another one of Octavo, in turn: whether a change has cost speed.

    python -m benchmarks.against CHECKOUT [--codecs int8,int4] [--model smollm2-135m] [--runs 7] [--threads 2]

CHECKOUT is a folder with an environment of its own in .venv. Each figure is tokens per second, the median of its runs
with their range; the ratio is taken pair by pair, above 1 where this checkout is faster.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import model_path
from benchmarks.machine import OtherLoad
from benchmarks.protocol import Worker
from benchmarks.texts import load_text
from benchmarks.workers import octavo_worker

PREFILL = (512, 2048)
DECODE = (128, 2048, 8000)
N_SHARED, SHARED, DECODE_TOKENS = 8, 2048, 48


def shown(values: list[float]) -> str:
    return f"{median(values):9.4g} ({min(values):.4g} to {max(values):.4g})"


def figures(worker: Worker, tokens: list[int]) -> dict[str, float]:
    """Tokens per second of one run of everything."""
    marks = [m for m in PREFILL if m <= len(tokens)]
    seconds = worker.call("prefill", tokens=tokens, marks=[*marks, len(tokens)])["seconds"]
    result = {f"prefill {m:,}": m / seconds[str(m)] for m in marks}
    for context in DECODE:
        times = worker.call("decode", context=min(context, len(tokens)), n=DECODE_TOKENS)["seconds"]
        result[f"decode at {context:,}"] = len(times) / sum(times)
    tails = [[100 + i] * 32 for i in range(N_SHARED)]
    times = worker.call("together", prefix=tokens[:SHARED], tails=tails, n=DECODE_TOKENS, warm=True)["times"]
    elapsed = min(t[-1] for t in times) - max(t[0] for t in times)
    done = sum(sum(1 for x in t if max(u[0] for u in times) < x <= min(u[-1] for u in times)) for t in times)
    result[f"decode of {N_SHARED} on {SHARED:,}"] = done / elapsed
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--codecs", default="int8,int4")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    root = args.checkout.resolve()
    for codec in args.codecs.split(","):
        other = Worker("other", str(root / ".venv/bin/python"), "benchmarks.octavo_worker", root=root)
        with octavo_worker() as this, other:
            settings: dict[str, Any] = {"model": str(model_path(args.model)), "cache": codec, "threads": args.threads}
            for worker in (this, other):
                worker.call("load", **settings, n_ctx=8192)
            tokens = this.call("tokenize", text=load_text("persuasion"))["tokens"][: DECODE[-1]]
            runs: list[tuple[dict[str, float], dict[str, float]]] = []
            load = OtherLoad([this.pid, other.pid])
            for _ in range(args.runs):
                runs.append((figures(this, tokens), figures(other, tokens)))
            print(f"{codec}, {args.threads} threads, {args.runs} pairs; {load.stop()}")
            for name in runs[0][0]:
                ours, theirs = [a[name] for a, _ in runs], [b[name] for _, b in runs]
                ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
                print(f"  {name:22}{shown(ours)}{shown(theirs)}  ratio {shown(ratios)}")


if __name__ == "__main__":
    main()
