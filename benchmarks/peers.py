"""Peers, each in an environment of its own: llama.cpp, built from source for this machine, and OpenVINO GenAI.

    python -m benchmarks.peers            # build and install them (20 minutes on 2 cores), or say where they are

OCTAVO_BENCH_LLAMA names a Python that has llama-cpp-python already, OCTAVO_BENCH_OPENVINO one that has openvino-genai.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import BenchmarkError
from benchmarks.protocol import ROOT

LLAMA_VERSION = "0.3.36"
LLAMA_ENVIRONMENT = ROOT / ".bench" / "llama"


OPENVINO_VERSION = "2026.4.1.0"
OPENVINO_ENVIRONMENT = ROOT / ".bench" / "openvino"


def llama_python() -> str:
    """A Python that imports llama_cpp, built first if need be. Raises BenchmarkError."""
    return _python("OCTAVO_BENCH_LLAMA", "llama_cpp", LLAMA_VERSION, LLAMA_ENVIRONMENT, _build_llama)


def openvino_python() -> str:
    """A Python that imports openvino_genai, installed first if need be. Raises BenchmarkError."""
    return _python("OCTAVO_BENCH_OPENVINO", "openvino_genai", OPENVINO_VERSION, OPENVINO_ENVIRONMENT, _install_openvino)


def _python(variable: str, module: str, version: str, environment: Path, build: Callable[[], None]) -> str:
    given = os.environ.get(variable)
    if given:
        found = _version(given, module)
        if found is None:
            raise BenchmarkError(f"{variable}={given} cannot import {module}")
        if not found.startswith(version):
            print(f"note: comparing with {module} {found}, not {version}", file=sys.stderr)
        return given
    python = str(environment / "bin" / "python")
    if not (Path(python).exists() and (_version(python, module) or "").startswith(version)):
        build()
    return python


def _version(python: str, module: str) -> str | None:
    code = f"import {module}; print({module}.__version__)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BenchmarkError(f"cannot run {python}: {error}") from error
    return done.stdout.strip() if done.returncode == 0 else None


def _install_openvino() -> None:
    subprocess.run([sys.executable, "-m", "venv", str(OPENVINO_ENVIRONMENT)], check=True)
    package = f"openvino-genai=={OPENVINO_VERSION}"
    if subprocess.run([str(OPENVINO_ENVIRONMENT / "bin" / "pip"), "install", "-q", package], check=False).returncode:
        raise BenchmarkError(f"{package} did not install (see above)")


def _build_llama() -> None:
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
    print(f"{python}: llama-cpp-python {_version(python, 'llama_cpp')}")
    python = openvino_python()
    print(f"{python}: openvino-genai {_version(python, 'openvino_genai')}")


if __name__ == "__main__":
    main()
