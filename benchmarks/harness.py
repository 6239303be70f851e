"""What the scripts share: models, results on disk, and statistics of few runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.protocol import ROOT
from octavo.models.loading.load import locate_model

RESULTS = ROOT / "benchmarks" / "results"

#: Peer -> Octavo's cache codec -> the peer's cache type of about the same size.
PAIRS = {
    "llama.cpp": {"f16": "f16", "int8": "q8_0", "int4": "q4_0"},
    "OpenVINO": {"f16": "f16", "int8": "u8", "int4": "u4"},
    "transformers": {"f16": "f32", "int8": "f32", "int4": "f32"},
    "vLLM": {"f16": "f32", "int8": "f32", "int4": "f32"},
}


def caches(peer: str, pair: str) -> tuple[str, str]:
    """Octavo's cache and the peer's, of a pair as "int8" or "int4:u8" names it."""
    codec, _, other = pair.partition(":")
    return codec, other or PAIRS[peer][codec]


def label(peer: str, pair: str) -> str:
    return " / ".join(caches(peer, pair))


class BenchmarkError(Exception):
    """A benchmark cannot run; the message says what is missing."""


def model_path(name: str) -> Path:
    """The file of a catalog name, fetched if need be. Raises octavo.errors.LoadError."""
    return locate_model(name).path


def load(name: str) -> dict[str, Any] | None:
    """What `save` wrote, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def taken() -> str:
    """When and of which revision a result is."""
    return f"{datetime.now(UTC).strftime('%Y-%m-%d %H:%M UTC')}, revision `{machine.describe()['revision']}`"


def save(name: str, settings: dict[str, Any], results: Any) -> Path:
    """Write results/NAME.json with everything that the tables are made from."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "benchmark": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine.describe(),
        "settings": settings,
        "results": results,
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
    return path


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of a few runs."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> dict[str, Any]:
    return asdict(Spread(statistics.median(values), min(values), max(values), len(values)))


@dataclass(frozen=True, slots=True)
class PerplexityChange:
    """Perplexity of one run relative to another on the same windows, in percent.

    `standard_error` is over windows: the spread of the windows' differences in mean negative log-likelihood, which
    pairing frees from how hard each window is.
    """

    percent: float
    standard_error: float
    n_windows: int


def perplexity_change(nll: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> PerplexityChange:
    """nll, base: per window, -log p of the same tokens in nats."""
    differences = []
    for window, base_window in zip(nll, base, strict=True):
        if len(window) != len(base_window):
            raise ValueError(f"windows of {len(window)} and {len(base_window)} tokens are not the same text")
        differences.append(statistics.fmean(window) - statistics.fmean(base_window))
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return PerplexityChange(100 * math.expm1(mean), 100 * math.exp(mean) * error, len(differences))


def perplexity(nll: Sequence[Sequence[float]]) -> float:
    """nll: per window, -log p in nats."""
    return math.exp(statistics.fmean([x for window in nll for x in window]))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
