"""Tables and pictures from benchmarks/results/*.json.

    python -m benchmarks.report             # print the tables, draw into benchmarks/results
    python -m benchmarks.report --update    # write them into docs/benchmarks.md and docs/images

In the document a table stands between <!-- begin NAME --> and <!-- end NAME -->; all else is written by hand and holds
no measured figure.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import memory, oracle, perplexity, plots, roofline, shared, speed, start
from benchmarks.harness import RESULTS, BenchmarkError, label, load, table
from benchmarks.protocol import ROOT

DOCUMENT = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"

Record = dict[str, Any]


def _origin(record: Record) -> str:
    return f"{record['date']}, revision `{record['machine']['revision']}`"


def machine(records: dict[str, Record]) -> str:
    record = records["speed-llama.cpp"]
    m, engines = record["machine"], record["results"]["engines"]
    peer = next(e for name, e in engines.items() if name.startswith("llama.cpp"))
    own = next(e for name, e in engines.items() if name.startswith("octavo"))
    rows = [
        ["processor", f"{m['cpu']} (family/model {m['cpu_family_model']}), {m['cores']} cores, {', '.join(m['isa'])}"],
        ["memory, L3", f"{m['memory_gib']} GiB, {m['l3']}"],
        ["system", f"Linux {m['kernel']}, {m['compiler']}, Python {m['python']}, numpy {m['numpy']}"],
        ["Octavo", f"{own['version']}, {own['system']}"],
        ["llama.cpp", f"{peer['version']}; {', '.join(re.findall(r'([A-Z0-9_]+) = 1', peer['system']))}"],
    ]
    if "speed-OpenVINO" in records:
        other = next(iter(dict(reversed(records["speed-OpenVINO"]["results"]["engines"].items())).values()))
        rows.append(["OpenVINO GenAI", f"{other['version']}, OpenVINO {other['system']}"])
    rows.append(["threads", str(record["settings"]["threads"])])
    return "| | |\n| --- | --- |\n" + "\n".join(f"| {a} | {b} |" for a, b in rows)


def verdict(records: dict[str, Record]) -> str:
    """Every comparison that Octavo loses and every claim that does not hold, without choosing."""
    lost, won = [], []
    for record in speed_records(records):
        settings = record["settings"]
        what = "" if settings["model"] == speed.DEFAULT_MODEL else f", {settings['model']}"
        what += ", streaming" if settings["streaming"] else ""
        for pair, measured in record["results"]["pairs"].items():
            for kind in ("decode", "prefill"):
                for how, n, entry in speed.entries(measured, kind):
                    ratio = entry["ratio"]
                    row = f"{kind} {int(n):,}{how}{what}, {label(settings['peer'], pair)}"
                    text = f"{row}, {settings['peer']}: {ratio['median']:.2f}"
                    (lost if ratio["median"] < 1 else won).append((ratio["median"], text))
    for record in shared_records(records):
        for row, ratio in shared.ratios(record):
            (lost if ratio < 1 else won).append((ratio, f"{row}: {ratio:.2f}"))
    lines = ["Octavo's speed over a peer's, below 1:"]
    lines += [f"- {text}" for _, text in sorted(lost)] or ["- none"]
    lines += ["", "and above:"]
    lines += [f"- {text}" for _, text in sorted(won, reverse=True)] or ["- none"]
    failed = [
        f"- {model}, {v['claim']}: {v['found']:.3f} ± {v['error']:.3f}, at most {v['bar']:g} was wanted"
        for model, result in records["perplexity"]["results"].items()
        for v in result["verdicts"]
        if not v["holds"]
    ]
    return "\n".join([*lines, "", "Bars on quality that are missed:", *(failed or ["- none"])])


def speed_records(records: dict[str, Record]) -> list[Record]:
    """Results of benchmarks.speed: the default model's first, streaming last, then by name."""
    found = [(name, record) for name, record in records.items() if name.startswith("speed-")]
    found.sort(key=lambda item: (item[1]["settings"]["streaming"], item[1]["settings"]["model"] != speed.DEFAULT_MODEL,
                                 item[0]))  # fmt: skip
    return [record for _, record in found]


def speed_table(kind: str) -> Callable[[dict[str, Record]], str]:
    def make(records: dict[str, Record]) -> str:
        parts = []
        for record in speed_records(records):
            settings, pairs = record["settings"], record["results"]["pairs"]
            if settings["streaming"] and kind == "prefill":
                continue
            load = max(p["other_load"]["other"] for p in pairs.values())
            how = ", Octavo streaming from its server" if settings["streaming"] else ""
            origins = sorted({pair.get("taken", _origin(record)) for pair in pairs.values()})
            parts.append(
                f"{speed.markdown(settings['peer'], pairs, kind)}\n\n{settings['model']}{how}; median (lowest-highest) "
                f"of the runs. {'; '.join(origins)}; everything else on the machine used at most {load:.2f} cores on "
                f"average meanwhile."
            )
        return "\n\n".join([*parts, f"![{kind} speed](images/{kind}.svg)"])

    return make


def python_share(records: dict[str, Record]) -> str:
    rows = [
        [codec, f"{int(n):,}", f"{s['step_ms']:.2f}", f"{s['python_ms']:.2f}", f"{s['share']:.1%}"]
        for codec, measured in records["speed-OpenVINO"]["results"]["pairs"].items()
        if ":" not in codec  # the same codec beside another of the peer's
        for n, s in measured["python_share"].items()
    ]
    return table(["cache", "context", "step, ms", "outside C++, ms", "share"], rows)


def shared_records(records: dict[str, Record]) -> list[Record]:
    return [record for name, record in sorted(records.items()) if name.startswith("shared-")]


def shared_table(records: dict[str, Record]) -> str:
    return "\n\n".join(
        f"{shared.markdown(record['settings']['peer'], record['results'])}\n\n{record['settings']['model']}; "
        f"{_origin(record)}."
        for record in shared_records(records)
    )


def roofline_table(records: dict[str, Record]) -> str:
    record = records["roofline"]
    s = record["settings"]
    return (
        f"{roofline.markdown(record['results'])}\n\n{s['shape']}, {s['threads']} threads, "
        f"{record['results']['isa']}; medians of {s['repeats']} turns. {_origin(record)}."
    )


def start_table(records: dict[str, Record]) -> str:
    record = records["start"]
    return f"{start.markdown(record['results'])}\n\n{record['settings']['model']}. {_origin(record)}."


def perplexity_tables(records: dict[str, Record]) -> str:
    record = records["perplexity"]
    s, parts = record["settings"], []
    for model, result in record["results"].items():
        parts.append(
            f"### {model}\n\n{perplexity.markdown(result['rows'])}\n\n"
            f"{perplexity.markdown_verdicts(result['verdicts'])}\n\n"
            f"{result['n_positions']:,} positions in {s['n_windows']} windows of {s['window']:,} of *{s['text']}*; "
            f"divergence over {s['kl_windows']} windows. {_origin(record)}."
        )
    return "\n\n".join(parts)


def memory_tables(records: dict[str, Record]) -> str:
    record = records["memory"]
    return "\n\n".join(
        f"### {model}\n\n{memory.markdown_per_token(result)}\n\n{memory.markdown_waste(result)}"
        for model, result in record["results"].items()
    )


def oracle_table(records: dict[str, Record]) -> str:
    record = records["oracle"]
    return f"{oracle.markdown(record['results'])}\n\n{_origin(record)}."


#: Block -> the results that it needs, and how it is made of them.
BLOCKS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Record]], str]]] = {
    "machine": (("speed-llama.cpp",), machine),
    "verdict": (("speed-llama.cpp", "perplexity"), verdict),
    "decode": (("speed-llama.cpp",), speed_table("decode")),
    "prefill": (("speed-llama.cpp",), speed_table("prefill")),
    "python-share": (("speed-OpenVINO",), python_share),
    "roofline": (("roofline",), roofline_table),
    "start": (("start",), start_table),
    "shared": (("shared-OpenVINO",), shared_table),
    "perplexity": (("perplexity",), perplexity_tables),
    "memory": (("memory",), memory_tables),
    "oracle": (("oracle",), oracle_table),
}


def blocks() -> dict[str, str]:
    """All blocks whose results are there."""
    records = all_records()
    return {name: make(records) for name, (needs, make) in BLOCKS.items() if all(n in records for n in needs)}


def all_records() -> dict[str, Record]:
    names = {name for needs, _ in BLOCKS.values() for name in needs}
    names |= {path.stem for kind in ("speed", "shared") for path in RESULTS.glob(f"{kind}-*.json")}
    return {name: record for name in names if (record := load(name)) is not None}


def updated(document: str, made: dict[str, str]) -> str:
    """The document with blocks replaced. Raises BenchmarkError for one that it does not have."""
    for name, text in made.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if len(pattern.findall(document)) != 1:
            raise BenchmarkError(f"{DOCUMENT} needs one <!-- begin {name} --> ... <!-- end {name} -->")
        document = pattern.sub(lambda m, text=text: f"{m.group(1)}{text}\n{m.group(2)}", document)  # type: ignore[misc]
    return document


def draw(folder: Path) -> None:
    records = [r for r in speed_records(all_records())
               if r["settings"]["model"] == speed.DEFAULT_MODEL and not r["settings"]["streaming"]]  # fmt: skip
    if records:
        for kind in ("decode", "prefill"):
            plots.speed(records, kind, folder / f"{kind}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write docs/benchmarks.md and docs/images")
    args = parser.parse_args()
    made = blocks()
    if args.update:
        quick = [name for name, record in all_records().items() if record["settings"].get("quick")]
        if quick:
            raise BenchmarkError(f"results of a --quick run are not for the document: {', '.join(quick)}")
        DOCUMENT.write_text(updated(DOCUMENT.read_text(), made))
        draw(IMAGES)
    else:
        for name, text in made.items():
            print(f"\n== {name}\n\n{text}")
        draw(RESULTS)


if __name__ == "__main__":
    main()
