"""What each cache codec costs in perplexity, and what rounded activations cost, on a novel.

    python -m benchmarks.perplexity [--models smollm2-135m,qwen2.5-coder-0.5b] [--text persuasion] [--no-peers]

Windows of 2,048 tokens are spread evenly over the text; every token from position 256 on is scored, so that each
scored query attends to at least eight sealed pages of 32 tokens, as Octavo's queries always do. All engines read the
same token ids. Differences are paired by window; the standard error is over windows. One window of 8,192 tokens shows
whether the loss grows with length; its error is over stretches of 512 tokens. The divergence is measured on the first
windows only.

Beside Octavo: llama.cpp with its own caches on the same windows, and transformers in float32 on the dequantized
weights, against which each engine shows what it loses in all; Octavo with an exact cache, by rounding the activations
that meet quantized weights.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import divergence
from benchmarks.harness import BenchmarkError, load, model_path, perplexity, perplexity_change, save, table
from benchmarks.protocol import Worker
from benchmarks.texts import load_text
from benchmarks.workers import llama_worker, octavo_worker, transformers_worker
from octavo.cache.format import Form, build_format
from octavo.config import EngineConfig
from octavo.models.loading.load import load_model

CODECS = ("f32", "f16", "int8", "int8/int4", "int4")
LLAMA_CACHES = ("f16", "q8_0", "q4_0")
#: Codecs that read the long window too.
LONG = ("f16", "int8", "int4")

#: The most that a codec may cost, percent over f16.
BARS = {
    "smollm2-135m": {"int8": 0.1, "int4": 1.0},
    "qwen2.5-coder-0.5b": {"int8": 0.1, "int4": 1.5},
}
#: The most that rounding the activations may cost, percent over float32.
ACTIVATION_BAR = 0.1
#: The most bits per cached value that int4 may take.
INT4_BITS = 4.75


@dataclass(frozen=True)
class Plan:
    n_windows: int = 9
    window: int = 2048
    first: int = 256
    long_window: int = 8192
    long_stretch: int = 512
    kl_windows: int = 2


QUICK = Plan(n_windows=2, window=1024, long_window=0, kl_windows=1)

Nll = list[list[float]]


def windows(tokens: list[int], n: int, length: int) -> list[list[int]]:
    """n runs of `length` tokens, evenly spread. Raises BenchmarkError where they would overlap."""
    if n * length > len(tokens):
        raise BenchmarkError(f"the text has {len(tokens):,} tokens; {n} windows of {length:,} do not fit")
    gap = (len(tokens) - length) // max(n - 1, 1)
    return [tokens[i * gap : i * gap + length] for i in range(n)]


class Measurement:
    """All runs on one model."""

    def __init__(self, model: str, text: str, plan: Plan, threads: int, backend: str) -> None:
        self.model, self.plan, self.threads, self.backend = model, plan, threads, backend
        self.path = str(model_path(model))
        loaded = load_model(self.path)
        self.cache_spec = loaded.spec.cache_spec()
        tokens = loaded.tokenizer.encode(load_text(text), add_special=False)
        self.windows = windows(tokens, plan.n_windows, plan.window)
        longest = min(plan.long_window, loaded.spec.context_length)
        self.long = tokens[:longest] if longest else []
        self.nll: dict[str, Nll] = {}
        self.long_nll: dict[str, Nll] = {}

    @property
    def n_positions(self) -> int:
        return sum(len(w) - self.plan.first for w in self.windows)

    def read(self, label: str, start: Callable[[], Worker], *, long: bool, **settings: Any) -> None:
        """Score every window with one engine."""
        print(f"{self.model}: {label} ...", file=sys.stderr, flush=True)
        with start() as worker:
            worker.call("load", model=self.path, threads=self.threads, **settings)
            scored = [worker.call("nll", tokens=w)["nll"][self.plan.first - 1 :] for w in self.windows]
            self.nll[label] = scored
            if long and self.long:
                nll = worker.call("nll", tokens=self.long)["nll"][self.plan.first - 1 :]
                size = self.plan.long_stretch
                self.long_nll[label] = [nll[i : i + size] for i in range(0, len(nll) - size + 1, size)]

    def read_all(self, peers: bool) -> None:
        n_ctx = max(self.plan.window, len(self.long))
        for codec in CODECS:
            self.read(
                f"octavo {codec}", octavo_worker, long=codec in LONG, cache=codec, n_ctx=n_ctx, backend=self.backend
            )
        for cache in LLAMA_CACHES if peers else ():
            self.read(f"llama.cpp {cache}", llama_worker, long=False, cache=cache, n_ctx=n_ctx)
        self.read("transformers f32", transformers_worker, long=False)

    def divergences(self) -> dict[str, divergence.Divergence]:
        print(f"{self.model}: divergence ...", file=sys.stderr, flush=True)
        config = EngineConfig(backend=self.backend, threads=self.threads)  # type: ignore[arg-type]
        chosen = self.windows[: self.plan.kl_windows]
        found = divergence.measure(self.path, list(CODECS), chosen, self.plan.first, config)
        for codec, result in found.items():
            if result.nll != self.nll[f"octavo {codec}"][: len(chosen)]:
                raise BenchmarkError(
                    f"{self.model}, {codec}: the engine and its runner gave different log-probabilities"
                )
        return found

    def bits_per_value(self, codec: str) -> float:
        """As allocated: alignment included."""
        keys, _, values = codec.partition("/")
        (group,) = self.cache_spec.groups
        fmt = build_format(group, EngineConfig().page_size, Form(keys, values or keys))
        return 8 * fmt.bytes_per_token / self.cache_spec.values_per_token

    def rows(self, divergences: dict[str, divergence.Divergence]) -> list[dict[str, Any]]:
        rows = []
        for label, nll in self.nll.items():
            engine, _, cache = label.partition(" ")
            base = self.nll[f"{engine} f32" if engine == "transformers" else f"{engine} f16"]
            row: dict[str, Any] = {
                "engine": engine, "cache": cache, "perplexity": perplexity(nll),
                "change": asdict(perplexity_change(nll, base)),
                "over_float32": asdict(perplexity_change(nll, self.nll["transformers f32"])),
                "window_nll": [sum(w) / len(w) for w in nll],
            }  # fmt: skip
            if engine == "octavo":
                row["bits_per_value"] = self.bits_per_value(cache)
                row["kl"], row["same_top"] = divergences[cache].kl, divergences[cache].same_top
            if label in self.long_nll:
                row["long_change"] = asdict(perplexity_change(self.long_nll[label], self.long_nll["octavo f16"]))
            rows.append(row)
        return rows


def verdicts(model: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each bar with what was found: the measured change itself is held against it, not the change less its error."""
    found = {row["cache"]: row for row in rows if row["engine"] == "octavo"}
    result = []
    for codec, bar in BARS.get(model, {}).items():
        change = found[codec]["change"]
        result.append({"claim": f"{codec} over f16, %", "bar": bar, "found": change["percent"],
                       "error": change["standard_error"], "holds": change["percent"] <= bar})  # fmt: skip
    bits = found["int4"]["bits_per_value"]
    result.append({"claim": "int4, bits per value", "bar": INT4_BITS, "found": bits, "error": 0.0,
                   "holds": bits <= INT4_BITS})  # fmt: skip
    change = found["f32"]["over_float32"]
    result.append({"claim": "exact cache over float32, %", "bar": ACTIVATION_BAR, "found": change["percent"],
                   "error": change["standard_error"], "holds": change["percent"] <= ACTIVATION_BAR})  # fmt: skip
    return result


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        lines.append([
            f"{row['engine']} {row['cache']}",
            f"{row['bits_per_value']:.2f}" if "bits_per_value" in row else "",
            f"{row['perplexity']:.4f}",
            _percent(row["change"]),
            f"{1e3 * row['kl']:.3f}" if "kl" in row else "",
            f"{row['same_top']:.2%}" if "same_top" in row else "",
            _percent(row["long_change"]) if "long_change" in row else "",
            _percent(row["over_float32"]),
        ])  # fmt: skip
    header = ["engine, cache", "bits per value", "perplexity", "over its f16, %", "KL x 1e3, nats", "same top token",
              "at 8,192, %", "over float32, %"]  # fmt: skip
    return table(header, lines)


def markdown_verdicts(found: list[dict[str, Any]]) -> str:
    rows = [
        [v["claim"], f"{v['bar']:g}", f"{v['found']:.3f} ± {v['error']:.3f}", "yes" if v["holds"] else "NO"]
        for v in found
    ]
    return table(["claim", "at most", "found", "holds"], rows)


def _percent(change: dict[str, Any]) -> str:
    error = change["standard_error"]
    return f"{change['percent']:+.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def measure(model: str, text: str, plan: Plan, threads: int, backend: str, peers: bool) -> dict[str, Any]:
    run = Measurement(model, text, plan, threads, backend)
    run.read_all(peers)
    rows = run.rows(run.divergences())
    found = verdicts(model, rows)
    print(
        f"\n{model}, {text}, {run.n_positions:,} positions\n{markdown(rows)}\n\n{markdown_verdicts(found)}\n",
        flush=True,
    )
    return {"n_positions": run.n_positions, "rows": rows, "verdicts": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(BARS))
    parser.add_argument("--text", default="persuasion")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="cpu", choices=["cpu", "reference"])
    parser.add_argument("--no-peers", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--quick", action="store_true", help="two short windows: a look, not a figure")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan()
    settings = {
        **asdict(plan),
        "quick": args.quick,
        "text": args.text,
        "threads": args.threads,
        "backend": args.backend,
    }
    # Models measured before under the same settings stay, so that they can be taken one by one.
    earlier = load("perplexity")
    results = earlier["results"] if earlier is not None and earlier["settings"] == settings else {}
    for model in args.models.split(","):
        results[model] = measure(model, args.text, plan, args.threads, args.backend, not args.no_peers)
        # After each model: an hour's work is not to be lost.
        print(f"written to {save('perplexity', settings, results)}")


if __name__ == "__main__":
    main()
