"""The cpu backend: numpy arrays in, C++ kernels (octavo.ops._cpu) inside, the GIL released while they run.

Weights are repacked at load into the order in which the kernels read them (csrc/linear_pack.cpp); the embedding table
alone stays in the mapped file. Quantized weights multiply 16-bit integer activations with exact integer sums per group of
32 inputs; float weights multiply float32 activations. What is computed for a row never depends on the other rows or on
the number of threads (csrc/linear_types.hpp).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.models.spec import MlpWeights, ModelSpec, Tensor
from octavo.ops import _cpu

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(slots=True)
class CpuEmbedding:
    """A table in the mapped file, and the buffer that `embed` fills and returns a part of."""

    kernel: Any
    width: int
    buffer: F32


def default_threads() -> int:
    """Physical cores among the processors that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:  # not Linux, or hidden by the container: count logical processors
            cores.add(str(cpu))
    return max(1, len(cores))


class CpuOps:
    """Implements octavo.ops.base.Ops. One instance serves one engine; its calls run one at a time.

    Args:
        threads: threads that compute, the caller among them; 0 takes one per physical core.
        isa: "auto", "portable", "avx2" or "avx512".

    Raises:
        ConfigError: for an impossible number of threads, or an instruction set that this build or machine lacks.
    """

    name = "cpu"

    def __init__(self, threads: int = 0, isa: str = "auto") -> None:
        try:
            self.context = _cpu.Context(threads or default_threads(), isa)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.arithmetic = f"{self.context.isa}/{_cpu.KERNEL_REVISION}"

    def prepare_embedding(self, weight: Tensor) -> CpuEmbedding:
        """`weight.data` stays in use. Raises LoadError where a scale is NaN or infinite, as all `prepare_*` do."""
        kernel = _cpu.Embedding(self.context, stored(weight))
        return CpuEmbedding(kernel, weight.cols, np.empty((0, weight.cols), np.float32))

    def prepare_mlp(self, spec: ModelSpec, weights: MlpWeights) -> Any:
        return _cpu.Mlp(
            self.context,
            _vector(weights.norm),
            spec.norm_eps,
            stored(weights.gate),
            stored(weights.up),
            stored(weights.down),
        )

    def prepare_head(self, spec: ModelSpec, norm: F32, weight: Tensor) -> Any:
        return _cpu.Head(self.context, _vector(norm), spec.norm_eps, stored(weight))

    def embed(self, embedding: CpuEmbedding, tokens: I32) -> F32:
        n = len(tokens)
        if len(embedding.buffer) < n:
            embedding.buffer = np.empty((n, embedding.width), np.float32)
        out = embedding.buffer[:n]
        embedding.kernel.lookup(self.context, tokens, out)
        return out

    def mlp_block(self, block: Any, hidden: F32) -> None:
        block.run(self.context, hidden)

    def head(self, head: Any, hidden: F32, rows: Sequence[int] | I32) -> F32:
        picked = np.ascontiguousarray(rows, dtype=np.int32)
        out = np.empty((len(picked), head.rows), np.float32)
        head.run(self.context, hidden, picked, out)
        return out

    def log_softmax(self, logits: F32) -> F32:
        out = np.empty_like(logits)
        _cpu.log_softmax(self.context, logits, out)
        return out


def stored(tensor: Tensor) -> Any:
    """A Tensor as the kernels take it. Raises UnsupportedError for a type that they do not read."""
    return _cpu.Stored(tensor.name, tensor.dtype, tensor.rows, tensor.cols, tensor.data, tensor.row_order)


def _vector(values: F32) -> F32:
    return np.ascontiguousarray(values, dtype=np.float32)
