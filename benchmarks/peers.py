"""llama.cpp, built from source for this machine, in an environment of its own.

    python -m benchmarks.peers            # build it (about 20 minutes on 2 cores) or say where it is

OCTAVO_BENCH_LLAMA names a Python that has llama-cpp-python already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import BenchmarkError
from benchmarks.protocol import ROOT

LLAMA_VERSION = "0.3.36"
LLAMA_ENVIRONMENT = ROOT / ".bench" / "llama"


def llama_python() -> str:
    """A Python that imports llama_cpp, built first if need be. Raises BenchmarkError."""
    given = os.environ.get("OCTAVO_BENCH_LLAMA")
    if given:
        version = _version(given)
        if version is None:
            raise BenchmarkError(f"OCTAVO_BENCH_LLAMA={given} cannot import llama_cpp")
        if version != LLAMA_VERSION:
            print(f"note: comparing with llama-cpp-python {version}, not {LLAMA_VERSION}", file=sys.stderr)
        return given
    python = str(LLAMA_ENVIRONMENT / "bin" / "python")
    if not (Path(python).exists() and _version(python) == LLAMA_VERSION):
        _build()
    return python


def _version(python: str) -> str | None:
    code = "import llama_cpp; print(llama_cpp.__version__)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BenchmarkError(f"cannot run {python}: {error}") from error
    return done.stdout.strip() if done.returncode == 0 else None


def _build() -> None:
    print(f"building llama.cpp in {LLAMA_ENVIRONMENT}; this takes about 20 minutes", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(LLAMA_ENVIRONMENT)], check=True)
    # From source, so that it is compiled for this machine's instruction set as Octavo is.
    done = subprocess.run(
        [str(LLAMA_ENVIRONMENT / "bin" / "pip"), "install", "-q", "--no-binary", "llama-cpp-python",
         f"llama-cpp-python=={LLAMA_VERSION}"],
        env={**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)},
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise BenchmarkError(
            f"llama-cpp-python {LLAMA_VERSION} did not build (see above); "
            f"build it elsewhere and point OCTAVO_BENCH_LLAMA at its Python"
        )


def main() -> None:
    python = llama_python()
    print(f"{python}: llama-cpp-python {_version(python)}")


if __name__ == "__main__":
    main()
