"""Greedy text against independent implementations on the same GGUF files: 64 tokens on 20 prompts.

    python -m benchmarks.oracle [--models smollm2-135m,qwen2.5-coder-0.5b]

All with float32 caches. The judge is transformers, in float32 on dequantized weights: what rounding it leaves open is
said in `benchmarks.agreement`. llama.cpp is put to the same test beside Octavo, and judges Octavo too; it rounds the
activations that meet quantized weights to 8 bits, which shows here.
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
from octavo.models.loading.load import load_model

N_TOKENS = 64
N_CTX = 512

#: (whose text, judged by whom).
TRIALS = (("octavo", "transformers"), ("llama.cpp", "transformers"), ("octavo", "llama.cpp"))

Row = dict[str, Any]


def measure(model: str, trials: list[tuple[str, str]], backend: str, threads: int) -> dict[str, list[Row]]:
    """ "whose text by whom" -> a row per prompt."""
    path = model_path(model)
    prompts = encoded(load_model(path).tokenizer)
    texts: dict[str, list[list[int]]] = {}
    for engine in dict.fromkeys(engine for engine, _ in trials):
        with _start(engine, path, threads, backend) as worker:
            texts[engine] = [worker.call("greedy", tokens=tokens, n=N_TOKENS)["tokens"] for _, tokens in prompts]
    results: dict[str, list[Row]] = {}
    for judge in dict.fromkeys(judge for _, judge in trials):
        with _start(judge, path, threads, backend) as worker:
            for engine in (engine for engine, by in trials if by == judge):
                rows = results.setdefault(f"{engine} by {judge}", [])
                for (text, tokens), got in zip(prompts, texts[engine], strict=True):
                    steps = worker.call("greedy_along", prompt=tokens, continuation=got)["steps"]
                    agreement = compare([OracleStep(*step) for step in steps], got)
                    print(f"{model}, {engine} by {judge}: {_verdict(agreement):36} {text[:40]!r}", flush=True)
                    rows.append({"prompt": text, "agrees": agreement.agrees, **asdict(agreement)})
    return results


def _start(engine: str, path: Path, threads: int, backend: str) -> Worker:
    settings: dict[str, Any] = {"model": str(path), "threads": threads}
    if engine == "transformers":
        worker = transformers_worker()
    else:
        settings |= {"cache": "f32", "n_ctx": N_CTX}
        worker = llama_worker() if engine == "llama.cpp" else octavo_worker()
    if engine == "octavo":
        settings["backend"] = backend
    worker.call("load", **settings)
    return worker


def _verdict(agreement: Agreement) -> str:
    if agreement.equal:
        return f"{agreement.n_equal} equal"
    word = "tied" if agreement.agrees else "DIFFERS"
    return f"{agreement.n_equal} equal, then {word} (gap {agreement.gap:.3f})"


def markdown(results: dict[str, dict[str, list[Row]]]) -> str:
    """A row per model and trial: how the prompts fared."""
    rows = []
    for model, trials in results.items():
        for trial, entries in trials.items():
            equal = sum(e["n_equal"] == e["n_compared"] for e in entries)
            tied = sum(e["agrees"] for e in entries) - equal
            gaps = [e["gap"] for e in entries if e["gap"] is not None]
            counts = [len(entries), equal, tied, len(entries) - equal - tied]
            rows.append([model, trial, *map(str, counts), f"{max(gaps):.3f}" if gaps else "-"])
    header = ["model", "text, judge", "prompts", "equal", "differ first at a tie", "disagree", "largest gap, nats"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "reference"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one model, and transformers' judgement of Octavo alone")
    args = parser.parse_args()
    models, trials = args.models.split(","), list(TRIALS)
    if args.quick:
        models, trials = models[:1], trials[:1]
    results = {m: measure(m, trials, args.backend, args.threads) for m in models}
    print("\n" + markdown(results))
    settings = {"backend": args.backend, "threads": args.threads, "n_tokens": N_TOKENS, "quick": args.quick}
    print(f"\nwritten to {save('oracle', settings, results)}")


if __name__ == "__main__":
    main()
