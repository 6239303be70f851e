"""The attention blocks of one model on the cpu backend, and the page formats that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import octavo.ops._cpu as _cpu
from octavo.cache.format import PageFormat, PlacedPlane, open_format
from octavo.codecs.base import Role
from octavo.errors import CodecRangeError, UnsupportedError
from octavo.models.rope import rope_tables
from octavo.models.spec import AttentionWeights, ModelSpec, Tensor
from octavo.ops.base import F32, SPLIT_PAGES, Batch
from octavo.ops.host_store import host_memory

#: Rotary tables start with this many positions and double as sequences grow.
_FIRST_POSITIONS = 4096


@dataclass(slots=True)
class _Group:
    """One cache group: its formats, and once the model is known its cache layout and the step that a batch becomes."""

    formats: list[PageFormat] = field(default_factory=list)
    cache: Any = None
    step: Any = None


class CpuAttention:
    """Prepares and runs attention blocks.

    All layers share one rotary table, those of a cache group one cache layout, and the step that a batch is turned
    into: checked and cut into tasks once, then used by every layer.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._groups: list[_Group] = []
        self._spec: ModelSpec | None = None
        self._page_size = 0
        self._cos = self._sin = np.empty((0, 0), np.float32)
        self._batch: Batch | None = None
        #: Tiles that shared pages and were run alone all the same (`Step.cascade_refused`), over all steps and groups.
        self.cascade_refused = 0

    def add_format(self, group: int, fmt: PageFormat) -> int:
        """The format's id in its group. The same format again gets the same id."""
        entry = self._group(group)
        if fmt in entry.formats:
            return entry.formats.index(fmt)
        if entry.cache is not None:
            self._register(entry.cache, fmt)
        entry.formats.append(fmt)
        return len(entry.formats) - 1

    def prepare(self, spec: ModelSpec, layer: int, weights: AttentionWeights, page_size: int) -> Any:
        """One layer's block. Raises LoadError or UnsupportedError where the kernels cannot take it."""
        self._set_model(spec, page_size)
        biases = [b for b in (weights.q_bias, weights.k_bias, weights.v_bias) if b is not None]
        if len(biases) not in (0, 3):
            raise UnsupportedError(f"layer {layer} has a bias on {len(biases)} of query, key and value: all or none")
        group, index = spec.cache_spec().group_of(layer)
        block = _cpu.AttentionBlock(
            self._context,
            self._groups[group].cache,
            index,
            layer,
            spec.norm_eps,
            spec.head_dim**-0.5,
            weights.norm,
            *(stored(t) for t in (weights.q, weights.k, weights.v, weights.o)),
            bias=np.concatenate(biases).astype(np.float32) if biases else None,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
        )
        return block, group

    def run(self, prepared: Any, hidden: F32, batch: Batch) -> None:
        """hidden [n, d_model] += the block's output for the batch. Raises CodecRangeError."""
        block, group = prepared
        if batch is not self._batch:
            self._assign(batch)
        try:
            block.run(self._context, self._groups[group].step, hidden)
        except CodecRangeError:
            # The block has restored its own group's open pages.
            for other in self._groups:
                other.step.restore()
            self._batch = None
            raise

    def _group(self, group: int) -> _Group:
        while len(self._groups) <= group:
            self._groups.append(_Group())
        return self._groups[group]

    def forget(self) -> None:
        """Drop the last batch: it and the step hold the arena."""
        self._batch = None
        for group in self._groups:
            if group.step is not None:
                group.step.clear()

    def _set_model(self, spec: ModelSpec, page_size: int) -> None:
        if self._spec is not None:
            if (spec, page_size) != (self._spec, self._page_size):
                raise ValueError("one backend serves one model and page size; make another")
            return
        if spec.n_heads % spec.n_kv_heads:
            raise UnsupportedError(f"{spec.n_heads} query heads do not divide among {spec.n_kv_heads} KV heads")
        if spec.head_dim % 8 or spec.head_dim > _cpu.MAX_HEAD_DIM:
            raise UnsupportedError(f"head_dim must be a multiple of 8 up to {_cpu.MAX_HEAD_DIM}, got {spec.head_dim}")
        for i, kind in enumerate(spec.cache_spec().groups):
            group, fmt = self._group(i), open_format(kind, page_size)
            group.cache = _cpu.CacheLayout(
                self._context,
                page_size,
                spec.n_kv_heads,
                spec.head_dim,
                spec.n_heads // spec.n_kv_heads,
                SPLIT_PAGES,
                [_plane(p) for p in fmt.planes[Role.KEY]],
                [_plane(p) for p in fmt.planes[Role.VALUE]],
                fmt.page_bytes,
            )
            group.step = _cpu.Step(group.cache)
            for other in group.formats:
                self._register(group.cache, other)
        self._spec, self._page_size = spec, page_size

    def _register(self, cache: Any, fmt: PageFormat) -> None:
        keys, values = ([_plane(p) for p in fmt.planes[role]] for role in (Role.KEY, Role.VALUE))
        cache.add_format(self._context, keys, values, fmt.page_bytes)

    def _assign(self, batch: Batch) -> None:
        """Turn the batch into the steps that all layers run."""
        if batch.row_start[-1] != len(batch.tokens):
            raise ValueError(f"row_start ends with {batch.row_start[-1]}, but the batch has {len(batch.tokens)} rows")
        assert self._spec is not None
        end, limit = int((batch.position + batch.row_start[1:] - batch.row_start[:-1]).max()), self._spec.context_length
        if end > limit:
            raise ValueError(f"a segment ends at position {end - 1}; the model's last is {limit - 1}")
        self._grow_tables(end)
        self._batch = None
        for group, entries in zip(self._groups, batch.groups, strict=True):
            group.step.assign(
                self._context,
                host_memory(batch.store),
                batch.row_start,
                batch.position,
                entries.first_list,
                entries.entry_start,
                entries.page_offset,
                entries.page_format,
                entries.position,
                entries.n_tokens,
                entries.open_offset,
                self._cos,
                self._sin,
            )
            self.cascade_refused += group.step.cascade_refused
        self._batch = batch

    def _grow_tables(self, n: int) -> None:
        if n > len(self._cos) or not len(self._cos):
            assert self._spec is not None
            size = _FIRST_POSITIONS
            while size < n:
                size *= 2
            self._cos, self._sin = rope_tables(self._spec.rope, size)


def stored(tensor: Tensor) -> Any:
    """A tensor as the kernels take it."""
    return _cpu.Stored(tensor.name, tensor.dtype, tensor.rows, tensor.cols, tensor.data, tensor.row_order)


def _plane(placed: PlacedPlane) -> tuple[int, bool, int]:
    return placed.codec.kernel_id, placed.codec.rotates(placed.plane), placed.offset
