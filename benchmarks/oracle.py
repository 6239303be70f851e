"""Greedy text against independent implementations on the same GGUF files: 64 tokens on 20 prompts.

    python -m benchmarks.oracle [--models smollm2-135m,qwen2.5-coder-0.5b] [--oracles llama.cpp,transformers]

All with float32 caches. transformers computes in float32 on dequantized weights. llama.cpp, like Octavo, rounds the
activations that meet quantized weights to 8 bits, in blocks of its own choosing. What may follow from rounding is said
in `benchmarks.agreement`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.agreement import Agreement, OracleStep, compare
from benchmarks.harness import model_path, save, table
from benchmarks.prompts import encoded
from benchmarks.protocol import Worker
from benchmarks.workers import llama_worker, octavo_worker, transformers_worker

N_TOKENS = 64
N_CTX = 512

Row = dict[str, Any]


def measure(model: str, oracles: list[str], backend: str, threads: int) -> dict[str, list[Row]]:
    """oracle -> a row per prompt."""
    from octavo.models.loading.load import load_model

    path = model_path(model)
    prompts = encoded(load_model(path).tokenizer)
    with octavo_worker() as octavo:
        octavo.call("load", model=str(path), cache="f32", threads=threads, n_ctx=N_CTX, backend=backend)
        ours = [octavo.call("greedy", tokens=tokens, n=N_TOKENS)["tokens"] for _, tokens in prompts]
    results: dict[str, list[Row]] = {}
    for name in oracles:
        rows = results.setdefault(name, [])
        with _start(name, path, threads) as oracle:
            for (text, tokens), got in zip(prompts, ours, strict=True):
                steps = oracle.call("greedy_along", prompt=tokens, continuation=got)["steps"]
                agreement = compare([OracleStep(*step) for step in steps], got)
                print(f"{model} / {name}: {_verdict(agreement):36} {text[:50]!r}", flush=True)
                rows.append({"prompt": text, "agrees": agreement.agrees, **asdict(agreement)})
    return results


def _start(oracle: str, path: Path, threads: int) -> Worker:
    worker = llama_worker() if oracle == "llama.cpp" else transformers_worker()
    settings = {"cache": "f32", "n_ctx": N_CTX} if oracle == "llama.cpp" else {}
    worker.call("load", model=str(path), threads=threads, **settings)
    return worker


def _verdict(agreement: Agreement) -> str:
    if agreement.equal:
        return f"{agreement.n_equal} equal"
    word = "tied" if agreement.agrees else "DIFFERS"
    return f"{agreement.n_equal} equal, then {word} (gap {agreement.gap:.3f})"


def markdown(results: dict[str, dict[str, list[Row]]]) -> str:
    """A row per model and oracle: how the prompts fared."""
    rows = []
    for model, by_oracle in results.items():
        for oracle, entries in by_oracle.items():
            equal = sum(e["n_equal"] == e["n_compared"] for e in entries)
            tied = sum(e["agrees"] for e in entries) - equal
            gaps = [e["gap"] for e in entries if e["gap"] is not None]
            counts = [len(entries), equal, tied, len(entries) - equal - tied]
            rows.append([model, oracle, *map(str, counts), f"{max(gaps):.3f}" if gaps else "-"])
    header = ["model", "oracle", "prompts", "equal", "differ first at a tie", "disagree", "largest gap, nats"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b")
    parser.add_argument("--oracles", default="llama.cpp,transformers")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "reference"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the first model and oracle alone")
    args = parser.parse_args()
    models, oracles = args.models.split(","), args.oracles.split(",")
    if args.quick:
        models, oracles = models[:1], oracles[:1]
    results = {m: measure(m, oracles, args.backend, args.threads) for m in models}
    print("\n" + markdown(results))
    settings = {"backend": args.backend, "threads": args.threads, "n_tokens": N_TOKENS}
    print(f"\nwritten to {save('oracle', settings, results)}")


if __name__ == "__main__":
    main()
