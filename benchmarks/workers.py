"""The engines that can be measured, each started in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers import llama_python, openvino_python, vllm_python
from benchmarks.protocol import ROOT, Worker


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


def vllm_worker() -> Worker:
    """Raises BenchmarkError where vLLM's CPU build is not there and cannot be installed."""
    return Worker("vLLM", vllm_python(), "benchmarks.vllm_worker")


#: Name of a peer -> how its worker is started.
PEERS: dict[str, Callable[[], Worker]] = {
    "llama.cpp": llama_worker,
    "OpenVINO": openvino_worker,
    "transformers": transformers_worker,
    "vLLM": vllm_worker,
}


def peer_model(peer: str, path: Path) -> str:
    """The model as a peer reads it: the GGUF file, or a checkpoint of its weights, dequantized."""
    return str(dequantized(path) if peer == "vLLM" else path)


def dequantized(path: Path) -> Path:
    """A directory with the file's weights in float32, written once. Needs the extra `test`."""
    directory = ROOT / ".bench" / "checkpoints" / path.stem
    if not (directory / "config.json").exists():
        import transformers

        arguments = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(**arguments, dtype="float32")
        config = model.config
        del config.quantization_config  # else the dequantized weights count as quantized, and are not written
        plain = transformers.AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(model.state_dict())
        partial = directory.with_suffix(".partial")
        plain.save_pretrained(partial)
        transformers.AutoTokenizer.from_pretrained(**arguments).save_pretrained(partial)
        partial.rename(directory)
    return directory
