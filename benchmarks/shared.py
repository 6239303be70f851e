"""Requests that share a prefix, against a peer with prefix caching: in turn on the same machine, threads and tokens.

    python -m benchmarks.shared [--peer OpenVINO|vLLM] [--quick] [--threads 2] [--model smollm2-135m] [--codec int8]

- decode of 8: sequences that share a cached prefix and decode together; tokens per second of all of them, from the last
  one's first token to the first one's last.
- hit: one request, 4,096 tokens of whose prompt are cached and 32 are not; time to its first token.
- stampede: 8 requests that arrive at once with a prefix that nobody has computed; time to the last first token.

Each figure is the median of its runs; a ratio is taken pair by pair. Above 1, Octavo is faster.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import PAIRS, model_path, save, spread, table
from benchmarks.machine import OtherLoad
from benchmarks.protocol import Worker
from benchmarks.texts import load_text
from benchmarks.workers import PEERS, octavo_worker, peer_model

PEERS_HERE = ("OpenVINO", "vLLM")
N_SEQUENCES = 8
TAIL = 32
SETTLE_S = 0.2


@dataclass(frozen=True)
class Plan:
    decode: tuple[int, ...] = (2048, 4096)
    hit: int = 4096
    stampede: int = 2048
    runs: int = 5
    decode_tokens: int = 32


QUICK = Plan(decode=(1024,), hit=1024, stampede=1024, runs=2, decode_tokens=8)


def decode_rate(times: list[list[float]]) -> float:
    """Tokens per second while all sequences decode. times: per sequence, when each of its tokens came."""
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(begin < x <= end for t in times for x in t) / (end - begin)


def last_first(times: list[list[float]]) -> float:
    return max(t[0] for t in times)


def run(model: str, threads: int, peer_name: str, codec: str, plan: Plan) -> dict[str, Any]:
    path = model_path(model)
    longest = max(*plan.decode, plan.hit, plan.stampede)
    n_ctx = longest + TAIL + plan.decode_tokens + 64
    text = load_text("emma")
    with octavo_worker() as octavo, PEERS[peer_name]() as peer:
        sides = {"octavo": octavo, "peer": peer}
        caches = {"octavo": codec, "peer": PAIRS[peer_name][codec]}
        models = {"octavo": str(path), "peer": peer_model(peer_name, path)}
        engines = {
            f"{side} {caches[side]}": worker.call(
                "load", model=models[side], cache=caches[side], threads=threads, n_ctx=n_ctx
            )
            for side, worker in sides.items()
        }
        n_tails = (N_SEQUENCES + 1) * TAIL
        tokens = octavo.call("tokenize", text=text[: 8 * (longest + n_tails)])["tokens"]
        tails = [tokens[longest + i * TAIL : longest + (i + 1) * TAIL] for i in range(N_SEQUENCES)]
        load = OtherLoad([octavo.pid, peer.pid])
        rows: dict[str, dict[str, list[float]]] = {}

        def measure(name: str, n_prefix: int, n_requests: int, n: int, warm: bool, figure: Any) -> None:
            rows[name] = {"octavo": [], "peer": []}
            for i in range(plan.runs):
                # A first token of its own keeps a run from finding the one before.
                prefix = [1000 + len(rows) * 100 + i, *tokens[1:n_prefix]]
                for side, worker in sides.items():
                    time.sleep(SETTLE_S)
                    rows[name][side].append(figure(_together(worker, prefix, tails[:n_requests], n, warm)))
            _print_row(peer_name, name, rows[name])

        for n_prefix in plan.decode:
            measure(f"decode of {N_SEQUENCES}, {n_prefix:,} shared, tokens/s", n_prefix, N_SEQUENCES,
                    plan.decode_tokens, True, decode_rate)  # fmt: skip
        measure(f"hit of {plan.hit:,} and {TAIL} new, ms", plan.hit, 1, 1, True, lambda t: 1e3 * last_first(t))
        measure(f"stampede of {N_SEQUENCES} on {plan.stampede:,}, s", plan.stampede, N_SEQUENCES, 1, False, last_first)
        return {"engines": engines, "caches": caches, "rows": rows, "other_load": load.stop()}


def _together(worker: Worker, prefix: list[int], tails: list[list[int]], n: int, warm: bool) -> list[list[float]]:
    times: list[list[float]] = worker.call("together", prefix=prefix, tails=tails, n=n, warm=warm)["times"]
    return times


def _ratios(name: str, row: dict[str, list[float]]) -> list[float]:
    is_rate = name.endswith("tokens/s")
    return [a / b if is_rate else b / a for a, b in zip(row["octavo"], row["peer"], strict=True)]


def _print_row(peer: str, name: str, row: dict[str, list[float]]) -> None:
    print(
        f"{name}: Octavo {spread(row['octavo'])}, {peer} {spread(row['peer'])}, {spread(_ratios(name, row))}",
        flush=True,
    )


def ratios(record: dict[str, Any]) -> list[tuple[str, float]]:
    """What each row's ratio to the peer is, in the median."""
    return [
        (f"{name.rpartition(',')[0]}, {record['settings']['peer']}", spread(_ratios(name, row))["median"])
        for name, row in record["results"]["rows"].items()
    ]


def markdown(peer: str, results: dict[str, Any]) -> str:
    rows = []
    for name, row in results["rows"].items():
        ratio = spread(_ratios(name, row))
        cells = [
            f"{s['median']:.3g} ({s['low']:.3g}-{s['high']:.3g})" for s in map(spread, (row["octavo"], row["peer"]))
        ]
        rows.append([name, *cells, f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})", str(ratio["n"])])
    caches = results["caches"]
    header = ["work", f"Octavo {caches['octavo']}", f"{peer} {caches['peer']}", "ratio", "runs"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", default="OpenVINO", choices=PEERS_HERE)
    parser.add_argument("--codec", default="int8", choices=PAIRS["OpenVINO"])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs: a look, not a figure")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan()
    results = run(args.model, args.threads, args.peer, args.codec, plan)
    settings = {
        "model": args.model,
        "peer": args.peer,
        "threads": args.threads,
        "quick": args.quick,
        "runs": plan.runs,
        "codec": args.codec,
    }
    print(f"\nwritten to {save(f'shared-{args.peer}', settings, results)}")


if __name__ == "__main__":
    main()
