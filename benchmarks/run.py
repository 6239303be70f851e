"""Everything, one after another: about two and a half hours on 2 cores, on an otherwise idle machine.

    python -m benchmarks.run [--quick] [--only speed,memory] [--update]

Each benchmark is a process of its own and writes benchmarks/results/NAME.json; one that fails does not stop the others,
but the exit status says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.protocol import ROOT

#: Name -> module, arguments, and whether it knows --quick; in this order: the first two fetch and build what the others
#: need.
BENCHMARKS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "texts": ("texts", (), False),
    "peers": ("peers", (), False),
    "speed": ("speed", ("--peer", "llama.cpp"), True),
    "speed-openvino": ("speed", ("--peer", "OpenVINO", "--pairs", "int8,int4,f16,int4:u8,f16:f32"), True),
    "speed-transformers": ("speed", ("--peer", "transformers", "--pairs", "int8"), True),
    # OpenVINO GenAI cannot load this file.
    "speed-qwen": (
        "speed",
        (
            "--model",
            "qwen2.5-coder-0.5b",
            "--pairs",
            "int8:f16",
            "--prefill",
            "512,16000",
            "--decode",
            "128,4096,16000",
        ),
        False,
    ),
    "streaming": ("speed", ("--peer", "OpenVINO", "--pairs", "int8,int4:u8", "--streaming"), True),
    "shared": ("shared", ("--peer", "OpenVINO"), True),
    "shared-vllm": ("shared", ("--peer", "vLLM"), True),
    "start": ("start", (), True),
    "roofline": ("roofline", (), True),
    "memory": ("memory", (), False),
    "perplexity": ("perplexity", (), True),
    "oracle": ("oracle", (), True),
}


def run(module: str, *arguments: str) -> bool:
    print(f"\n=== {module} {' '.join(arguments)}", flush=True)
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *arguments], cwd=ROOT, check=False)
    print(
        f"=== {module}: {'done' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - start:,.0f} s", flush=True
    )
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few minutes: to see that all runs, not for figures")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="comma-separated")
    parser.add_argument("--update", action="store_true", help="write the figures into docs/benchmarks.md")
    args = parser.parse_args()
    chosen = args.only.split(",")
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    failed = [
        name
        for name, (module, arguments, knows_quick) in BENCHMARKS.items()
        if name in chosen and not run(module, *arguments, *(["--quick"] if args.quick and knows_quick else []))
    ]
    if not run("report", *(["--update"] if args.update else [])):
        failed.append("report")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
