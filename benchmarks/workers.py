"""The engines that can be measured, each started in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.peers import llama_python, openvino_python
from benchmarks.protocol import Worker


def octavo_worker() -> Worker:
    return Worker("Octavo", sys.executable, "benchmarks.octavo_worker")


def server_worker() -> Worker:
    return Worker("Octavo's server", sys.executable, "benchmarks.server_worker")


def llama_worker() -> Worker:
    """Raises BenchmarkError where llama.cpp is not there and cannot be built."""
    return Worker("llama.cpp", llama_python(), "benchmarks.llama_worker")


def openvino_worker() -> Worker:
    """Raises BenchmarkError where OpenVINO GenAI is not there and cannot be installed."""
    return Worker("OpenVINO", openvino_python(), "benchmarks.openvino_worker")


def transformers_worker() -> Worker:
    """Needs the extra `test`."""
    return Worker("transformers", sys.executable, "benchmarks.transformers_worker", {"TQDM_DISABLE": "1"})


#: Name of a peer -> how its worker is started.
PEERS: dict[str, Callable[[], Worker]] = {
    "llama.cpp": llama_worker,
    "OpenVINO": openvino_worker,
    "transformers": transformers_worker,
}
