"""Decode and prefill speed against a peer, in turn on the same machine, threads and tokens.

    python -m benchmarks.speed [--peer llama.cpp|OpenVINO|transformers|vLLM] [--pairs int8,int4:u8]
                               [--model smollm2-135m] [--prefill 512,2048] [--decode 128,8000] [--streaming] [--quick]
                               [--threads 2]

For each pair of caches (Octavo's f16, int8 and int4 against llama.cpp's f16, q8_0 and q4_0 with flash attention,
OpenVINO's f16, u8 and u4, or transformers' f32; others are named as OCTAVO:PEER) both engines are loaded in processes
of their own and take turns: A B, A B, ... A figure is the median of its runs, with their range; a ratio is taken pair
by pair, so that slow drift of the machine cancels. Prefill starts from an empty cache and ends when the next token is
chosen. Decode generates greedily from a cache of the given length, and from the shortest once more with sampling
(SAMPLED), which costs the same at every length. With --streaming Octavo is its server, whose answer
a client streams, while the peer stays a library. Results are written to speed-PEER[-MODEL][-streaming].json, beside
those of pairs that an earlier run took with the same settings.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.harness import caches, label, load, model_path, save, spread, table, taken
from benchmarks.machine import OtherLoad
from benchmarks.protocol import Worker
from benchmarks.texts import load_text
from benchmarks.workers import PEERS, octavo_worker, peer_model, server_worker

#: Decode beside greedy. Not with --streaming, whose client waits for text, which not every sampled token brings.
SAMPLED = {"temperature": 0.8, "top_p": 0.95}

#: What one engine's threads may still do when its answer is out (they spin before they sleep).
SETTLE_S = 0.2


@dataclass(frozen=True)
class Plan:
    """Attributes:
    prefill: prompt lengths; the longest prompt's run gives the shorter ones' times on its way.
    decode: context lengths.
    runs: of everything but the longest prefill.
    long_budget_s: the longest prefill is repeated, at least once and at most `runs` times, while a pair of runs
        still fits into this.
    decode_tokens: per run.
    """

    prefill: tuple[int, ...] = (512, 2048, 8000)
    decode: tuple[int, ...] = (128, 2048, 4096, 8000)
    runs: int = 5
    long_budget_s: float = 150.0
    decode_tokens: int = 32


QUICK = Plan(prefill=(512, 2048), decode=(128, 2048), runs=3, long_budget_s=20.0, decode_tokens=16)
DEFAULT_MODEL = "smollm2-135m"


@dataclass
class Turns:
    """Runs of one measurement, tokens per second, in the order in which they were taken."""

    octavo: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "octavo": spread(self.octavo),
            "peer": spread(self.peer),
            "ratio": spread([a / b for a, b in zip(self.octavo, self.peer, strict=True)]),
            "runs": {"octavo": self.octavo, "peer": self.peer},
        }


def measure_pair(octavo: Worker, peer: Worker, tokens: list[int], plan: Plan, *, sampled: bool) -> dict[str, Any]:
    prefill: dict[int, Turns] = {n: Turns() for n in plan.prefill}
    decode: dict[int, Turns] = {n: Turns() for n in plan.decode}
    longest, shorter = max(plan.prefill), sorted(plan.prefill)[:-1]

    def prefill_once(n: int) -> float:
        marks = [m for m in plan.prefill if m <= n]
        start = time.perf_counter()
        for worker, side in ((octavo, "octavo"), (peer, "peer")):
            time.sleep(SETTLE_S)
            seconds = worker.call("prefill", tokens=tokens[:n], marks=marks)["seconds"]
            for mark in marks:
                turns = prefill[mark]
                done = getattr(turns, side)
                if len(done) < plan.runs:
                    done.append(mark / seconds[str(mark)])
        return time.perf_counter() - start

    if shorter:
        for _ in range(plan.runs - 1):
            prefill_once(max(shorter))
    spent = 0.0
    for _ in range(plan.runs):
        took = prefill_once(longest)
        spent += took
        if spent + took > plan.long_budget_s:
            break

    def decode_runs(n: int, turns: Turns, **sampling: float) -> None:
        for _ in range(plan.runs):
            for worker, side in ((octavo, "octavo"), (peer, "peer")):
                time.sleep(SETTLE_S)
                seconds = worker.call("decode", context=n, n=plan.decode_tokens, **sampling)["seconds"]
                getattr(turns, side).append(len(seconds) / sum(seconds))

    # The caches now hold the longest prompt; contexts are cut from it, longest first.
    for n in sorted(plan.decode, reverse=True):
        decode_runs(n, decode[n])
    drawn = {min(plan.decode): Turns()} if sampled else {}
    for n, turns in drawn.items():
        decode_runs(n, turns, **SAMPLED)
    return {
        "prefill": {str(n): turns.summary() for n, turns in prefill.items()},
        "decode": {str(n): turns.summary() for n, turns in decode.items()},
        "sampled": {str(n): turns.summary() for n, turns in drawn.items()},
    }


def _python_share(octavo: Worker, context: int, n: int) -> dict[str, float]:
    steps = octavo.call("decode_clock", context=context, n=n)["steps"]
    wall, inside = (sum(column) for column in zip(*steps, strict=True))
    return {
        "step_ms": 1e3 * wall / len(steps),
        "python_ms": 1e3 * (wall - inside) / len(steps),
        "share": 1 - inside / wall,
    }


def run(
    model: str, threads: int, peer_name: str, pairs: list[str], plan: Plan, *, streaming: bool = False
) -> dict[str, Any]:
    path = model_path(model)
    text = load_text("emma")
    results: dict[str, Any] = {"pairs": {}, "engines": {}}
    longest = max(*plan.prefill, *plan.decode)
    n_ctx = -(-(longest + plan.decode_tokens + 2) // 256) * 256
    for pair in pairs:
        codec, other = caches(peer_name, pair)
        with (server_worker if streaming else octavo_worker)() as octavo, PEERS[peer_name]() as peer:
            results["engines"][f"octavo {codec}"] = octavo.call(
                "load", model=str(path), cache=codec, threads=threads, n_ctx=n_ctx
            )
            results["engines"][f"{peer_name} {other}"] = peer.call(
                "load", model=peer_model(peer_name, path), cache=other, threads=threads, n_ctx=n_ctx
            )
            tokens = octavo.call("tokenize", text=text[: 8 * longest])["tokens"]
            load = OtherLoad([octavo.pid, peer.pid])
            measured = measure_pair(octavo, peer, tokens[:longest], plan, sampled=not streaming)
            measured["other_load"] = load.stop()
            if not streaming:
                measured["python_share"] = {
                    str(n): _python_share(octavo, n, plan.decode_tokens) for n in sorted(plan.decode)
                }
            measured["taken"] = taken()
            results["pairs"][pair] = measured
        _print(peer_name, pair, measured)
    return results


def _print(peer: str, codec: str, measured: dict[str, Any]) -> None:
    print(f"\n{label(peer, codec)}, {peer}, other load {measured['other_load']['other']:.2f} cores")
    print(markdown(peer, {codec: measured}, "prefill"))
    print(markdown(peer, {codec: measured}, "decode"))
    share = measured.get("python_share", {})
    print("Python's share of a decode step:", ", ".join(f"{n}: {s['share']:.1%}" for n, s in share.items()), flush=True)


def markdown(peer_name: str, pairs: dict[str, Any], kind: str) -> str:
    """Tokens per second: a row per cache pair and length; of decode, those with sampling behind the greedy ones."""
    rows = []
    for codec, measured in pairs.items():
        for how, n, entry in entries(measured, kind):
            octavo, peer, ratio = entry["octavo"], entry["peer"], entry["ratio"]
            rows.append([
                label(peer_name, codec) + how, f"{int(n):,}", _cell(octavo), _cell(peer),
                f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})", str(ratio["n"]),
            ])  # fmt: skip
    header = ["cache", "tokens", "Octavo tok/s", f"{peer_name} tok/s", "ratio", "runs"]
    return table(header, rows)


def entries(measured: dict[str, Any], kind: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(how tokens are chosen, where not greedily; length; summary) of a pair's "prefill" or "decode"."""
    sampled = measured.get("sampled", {}) if kind == "decode" else {}  # results of earlier revisions have none
    how = f", temperature {SAMPLED['temperature']}, top_p {SAMPLED['top_p']}"
    return [("", n, e) for n, e in measured[kind].items()] + [(how, n, e) for n, e in sampled.items()]


def _cell(s: dict[str, Any]) -> str:
    return f"{s['median']:.1f} ({s['low']:.1f}-{s['high']:.1f})"


def lengths(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", choices=PEERS, default="llama.cpp")
    parser.add_argument("--pairs", default="f16,int8,int4", help="Octavo's codecs, or OCTAVO:PEER, comma-separated")
    parser.add_argument("--prefill", type=lengths, help="prompt lengths, multiples of 512 but for the longest")
    parser.add_argument("--decode", type=lengths, help="context lengths")
    parser.add_argument("--runs", type=int)
    parser.add_argument(
        "--streaming",
        action="store_true",
        help="Octavo as a server with a streaming client; of prefill the longest only",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs: a look, not a figure")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan()
    given = {name: getattr(args, name) for name in ("prefill", "decode", "runs") if getattr(args, name)}
    plan = replace(plan, **given)
    if args.streaming:  # a server tells of no progress within a prompt, and reads one to fill the cache
        plan = replace(plan, prefill=(max(plan.decode),), long_budget_s=0.0)
    results = run(args.model, args.threads, args.peer, args.pairs.split(","), plan, streaming=args.streaming)
    settings = {
        "model": args.model, "peer": args.peer, "threads": args.threads, "quick": args.quick, "runs": plan.runs,
        "decode_tokens": plan.decode_tokens, "long_budget_s": plan.long_budget_s, "streaming": args.streaming,
    }  # fmt: skip
    name = f"speed-{args.peer}"
    name += f"-{args.model}" if args.model != DEFAULT_MODEL else ""
    name += "-streaming" if args.streaming else ""
    # Pairs that an earlier run took in the same way stay.
    before = load(name)
    if before is not None and before["settings"] == settings:
        for part in ("pairs", "engines"):
            results[part] = {**before["results"][part], **results[part]}
    print(f"\nwritten to {save(name, settings, results)}")


if __name__ == "__main__":
    main()
