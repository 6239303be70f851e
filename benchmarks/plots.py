"""Pictures of the results, as SVG that comes out the same for the same figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import caches

_COLOURS = {"f16": "#4c72b0", "int8": "#dd8452", "int4": "#55a868"}


_STYLES = {"llama.cpp": "--s", "OpenVINO": ":^", "transformers": "-.x", "vLLM": "-.+"}


def speed(records: list[dict[str, Any]], kind: str, path: Path) -> None:
    """Tokens per second against context; bars from the slowest run to the fastest. Octavo's lines are those of the
    first record. kind: "decode" or "prefill"."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # Otherwise ids and dates differ from run to run.
    matplotlib.rcParams["svg.hashsalt"] = "octavo"
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for i, record in enumerate(records):
        peer = record["settings"]["peer"]
        sides = [("peer", _STYLES[peer], peer), *([("octavo", "-o", "Octavo")] if i == 0 else [])]
        for pair, measured in record["results"]["pairs"].items():
            if ":" in pair:  # a second partner of a codec that has its own
                continue
            codec, other = caches(peer, pair)
            lengths = sorted(measured[kind], key=int)
            x = [int(n) for n in lengths]
            for side, style, name in reversed(sides):
                s = [measured[kind][n][side] for n in lengths]
                median = [e["median"] for e in s]
                error = [[e["median"] - e["low"] for e in s], [e["high"] - e["median"] for e in s]]
                label = f"{name} {codec if side == 'octavo' else other}"
                axes.errorbar(x, median, error, fmt=style, color=_COLOURS[codec], label=label, capsize=3, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{n:,}" for n in x])
    axes.minorticks_off()
    axes.set_xlabel("tokens in the cache" if kind == "decode" else "prompt tokens")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    settings = records[0]["settings"]
    axes.set_title(f"{kind.capitalize()}, {settings['model']}, {settings['threads']} threads, batch 1", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
