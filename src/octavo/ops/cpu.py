"""The embedded backend: numpy arrays over C++ kernels, one call per block, the GIL released while they run.

Weights are repacked at load into the order in which the kernels read them (csrc/linear_pack.cpp); the embedding table
alone stays in the mapped file. Quantized weights multiply 16-bit integer activations with exact integer sums per group
of 32 inputs; float weights multiply float32 activations. What is computed for a row never depends on the other rows or
on the number of threads (csrc/linear_types.hpp).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import octavo.ops._cpu as _cpu
from octavo.cache.format import PageFormat
from octavo.errors import ConfigError
from octavo.models.spec import AttentionWeights, MlpWeights, ModelSpec, Tensor
from octavo.ops.base import F32, I32, Batch, Sampling
from octavo.ops.cpu_attention import CpuAttention, stored
from octavo.ops.host_store import HostStore


class CpuOps:
    """Implements `octavo.ops.base.Ops`. One instance serves one model.

    Args:
        threads: threads that compute, the caller's included; 0 takes one per physical core that this process may use.
        isa: "auto", "portable", "avx2" or "avx512".

    Raises:
        ConfigError: for an impossible number of threads, or an instruction set that this build or machine lacks.
            `prepare_*` raise LoadError where a weight or its scale is NaN or infinite, or shapes do not fit, and
            UnsupportedError for a tensor type that no kernel reads.
    """

    name = "cpu"

    def __init__(self, *, threads: int = 0, isa: str = "auto") -> None:
        try:
            self.context = _cpu.Context(threads or usable_cores(), isa)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.arithmetic = f"{self.context.isa}/{_cpu.KERNEL_REVISION}"
        self._attention = CpuAttention(self.context)
        self._hidden = np.empty((0, 0), np.float32)
        self._logits = np.empty((0, 0), np.float32)

    def prepare_embedding(self, weight: Tensor) -> Any:
        return _cpu.Embedding(self.context, stored(weight)), weight.cols

    def prepare_attention(self, spec: ModelSpec, layer: int, weights: AttentionWeights, page_size: int) -> Any:
        return self._attention.prepare(spec, layer, weights, page_size)

    def prepare_mlp(self, spec: ModelSpec, weights: MlpWeights) -> Any:
        return _cpu.Mlp(
            self.context, weights.norm, spec.norm_eps, stored(weights.gate), stored(weights.up), stored(weights.down)
        )

    def prepare_head(self, spec: ModelSpec, norm: F32, weight: Tensor) -> Any:
        return _cpu.Head(self.context, norm, spec.norm_eps, stored(weight))

    def add_format(self, group: int, fmt: PageFormat) -> int:
        return self._attention.add_format(group, fmt)

    @property
    def cascade_refused(self) -> int:
        """Tiles, over all steps and cache groups, whose pages were not read once for all that share them, because the
        partial results would have taken too much memory. A tile is the rows of a page that are attended together: a
        decoding sequence has one."""
        return self._attention.cascade_refused

    def new_store(self, n_bytes: int) -> HostStore:
        return HostStore(n_bytes)

    def embed(self, embedding: Any, tokens: I32) -> F32:
        table, d_model = embedding
        self._hidden = _at_least(self._hidden, len(tokens), d_model)
        hidden = self._hidden[: len(tokens)]
        table.lookup(self.context, tokens, hidden)
        return hidden

    def attention_block(self, block: Any, hidden: F32, batch: Batch) -> None:
        self._attention.run(block, hidden, batch)

    def mlp_block(self, block: Any, hidden: F32) -> None:
        block.run(self.context, hidden)

    def head(self, head: Any, hidden: F32, rows: Sequence[int] | I32) -> F32:
        self._logits = _at_least(self._logits, len(rows), head.rows)
        out = self._logits[: len(rows)]
        head.run(self.context, hidden, np.ascontiguousarray(rows, dtype=np.int32), out)
        return out

    def log_softmax(self, logits: F32) -> F32:
        out = np.empty_like(logits)
        _cpu.log_softmax(self.context, logits, out)
        return out

    def sample(self, logits: F32, sampling: Sampling) -> I32:
        """See Ops. Every instruction set draws the same token: its exponential has no fused operations."""
        out = np.empty(len(logits), np.int32)
        s = sampling
        _cpu.sample(self.context, logits, s.temperature, s.top_k, s.top_p, s.min_p, s.uniform, out)
        return out

    def forget(self) -> None:
        self._attention.forget()


def _at_least(buffer: F32, rows: int, cols: int) -> F32:
    """The buffer, or a larger one in its place."""
    if len(buffer) >= rows and buffer.shape[1] == cols:
        return buffer
    return np.empty((rows, cols), np.float32)


def usable_cores() -> int:
    """Physical cores among the processors that this process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:  # not Linux, or hidden by a container: each processor counts
            cores.add(str(cpu))
    return len(cores)
