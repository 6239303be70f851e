"""From the start of a process to its first token, the model's file in the page cache.

    python -m benchmarks.start [--model smollm2-135m] [--peers llama.cpp,OpenVINO,vLLM] [--runs 5] [--threads 2]

Every engine is started by the worker protocol, loads the model, reads a prompt of 16 tokens and chooses one; in turn,
`runs` times each. "Octavo's server" is `octavo serve` until a client has the first token of a streamed completion.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import PAIRS, model_path, save, spread, table
from benchmarks.protocol import Worker
from benchmarks.workers import PEERS, octavo_worker, peer_model, server_worker

PROMPT = list(range(1000, 1016))
CONTEXT = 2048


def once(start: Callable[[], Worker], path: str, cache: str, threads: int) -> float:
    begin = time.perf_counter()
    with start() as worker:
        worker.call("load", model=path, cache=cache, threads=threads, n_ctx=CONTEXT)
        worker.call("prefill", tokens=PROMPT, marks=[len(PROMPT)])
        return time.perf_counter() - begin


def run(model: str, threads: int, peers: list[str], runs: int) -> dict[str, list[float]]:
    path = model_path(model)
    engines = {"Octavo": (octavo_worker, str(path), "int8"), "Octavo's server": (server_worker, str(path), "int8")}
    engines |= {peer: (PEERS[peer], peer_model(peer, path), PAIRS[peer]["int8"]) for peer in peers}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(runs + 1):
        for name, (start, file, cache) in engines.items():
            taken = once(start, file, cache, threads)
            if turn:  # the first turn fills the page cache
                seconds[name].append(taken)
    return seconds


def markdown(results: dict[str, list[float]]) -> str:
    rows = []
    for name, seconds in results.items():
        s = spread(seconds)
        ratio = spread([b / a for a, b in zip(results["Octavo"], seconds, strict=True)])
        rows.append(
            [name, f"{s['median']:.2f} ({s['low']:.2f}-{s['high']:.2f})", f"{ratio['median']:.1f}", str(s["n"])]
        )
    return table(["engine", "seconds", "over Octavo's", "runs"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default="llama.cpp,OpenVINO,vLLM")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one run each: a look, not a figure")
    args = parser.parse_args()
    results: dict[str, Any] = run(args.model, args.threads, args.peers.split(","), 1 if args.quick else args.runs)
    print(markdown(results))
    settings = {"model": args.model, "threads": args.threads, "runs": args.runs, "quick": args.quick}
    print(f"\nwritten to {save('start', settings, results)}")


if __name__ == "__main__":
    main()
