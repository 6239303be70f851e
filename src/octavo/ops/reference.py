"""The oracle: plain float32 torch, one row at a time, readable before all else.

Every row is computed alone, so nothing can depend on batch mates or chunking; sealed pages are read through the numpy
codecs that define their bytes. Slow by design. Needs the `torch` extra.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor as T

from octavo.cache.format import PageFormat, PlacedPlane, open_format
from octavo.codecs.base import Role
from octavo.errors import CodecRangeError
from octavo.models.loading.dequant import dequantize
from octavo.models.rope import rope_tables
from octavo.models.spec import AttentionWeights, MlpWeights, ModelSpec, Tensor
from octavo.ops.base import Batch, Sampling
from octavo.ops.host_store import HostStore

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


def _matrix(weight: Tensor) -> T:
    values = dequantize(weight)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _vector(values: F32 | None) -> T | None:
    return None if values is None else torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _rms_norm(x: T, weight: T, eps: float) -> T:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@dataclass(frozen=True, slots=True)
class _Attention:
    spec: ModelSpec
    layer: int
    page_size: int
    keys: PlacedPlane
    values: PlacedPlane
    norm: T
    q: T
    k: T
    v: T
    o: T
    q_bias: T | None
    k_bias: T | None
    v_bias: T | None
    q_norm: T | None
    k_norm: T | None
    cos: T
    sin: T


@dataclass(frozen=True, slots=True)
class _Mlp:
    eps: float
    norm: T
    gate: T
    up: T
    down: T


@dataclass(frozen=True, slots=True)
class _Head:
    eps: float
    norm: T
    weight: T


class ReferenceOps:
    """Implements `octavo.ops.base.Ops`."""

    name = "reference"
    arithmetic = f"torch-{torch.__version__}/1"

    def __init__(self) -> None:
        self._formats: list[PageFormat] = []
        self._batch: Batch | None = None
        #: What this step has written over in open pages: a step that fails leaves them as they were.
        self._overwritten: list[tuple[int, U8]] = []
        self._rope: dict[tuple[object, int], tuple[T, T]] = {}

    def prepare_embedding(self, weight: Tensor) -> T:
        return _matrix(weight)

    def prepare_attention(self, spec: ModelSpec, layer: int, weights: AttentionWeights, page_size: int) -> _Attention:
        key = (spec.rope, spec.context_length)
        if key not in self._rope:
            cos, sin = rope_tables(spec.rope, spec.context_length)
            self._rope[key] = (torch.from_numpy(cos), torch.from_numpy(sin))
        cos_t, sin_t = self._rope[key]
        group, index = spec.cache_spec().group_of(layer)
        opened = open_format(spec.cache_spec().groups[group], page_size)
        norm = _vector(weights.norm)
        assert norm is not None
        return _Attention(
            spec=spec, layer=layer, page_size=page_size, keys=opened.planes[Role.KEY][index],
            values=opened.planes[Role.VALUE][index],
            norm=norm, q=_matrix(weights.q), k=_matrix(weights.k), v=_matrix(weights.v), o=_matrix(weights.o),
            q_bias=_vector(weights.q_bias), k_bias=_vector(weights.k_bias), v_bias=_vector(weights.v_bias),
            q_norm=_vector(weights.q_norm), k_norm=_vector(weights.k_norm), cos=cos_t, sin=sin_t,
        )  # fmt: skip

    def prepare_mlp(self, spec: ModelSpec, weights: MlpWeights) -> _Mlp:
        norm = _vector(weights.norm)
        assert norm is not None
        return _Mlp(spec.norm_eps, norm, _matrix(weights.gate), _matrix(weights.up), _matrix(weights.down))

    def prepare_head(self, spec: ModelSpec, norm: F32, weight: Tensor) -> _Head:
        vector = _vector(norm)
        assert vector is not None
        return _Head(spec.norm_eps, vector, _matrix(weight))

    def add_format(self, fmt: PageFormat) -> int:
        self._formats.append(fmt)
        return len(self._formats) - 1

    def new_store(self, n_bytes: int) -> HostStore:
        return HostStore(n_bytes)

    def embed(self, embedding: T, tokens: I32) -> F32:
        result: F32 = embedding[torch.from_numpy(tokens.astype(np.int64))].numpy()
        return result

    def attention_block(self, block: _Attention, hidden: F32, batch: Batch) -> None:
        if batch is not self._batch:
            self._batch, self._overwritten = batch, []
        try:
            for s in range(len(batch.position)):
                self._attend_segment(block, hidden, batch, s)
        except CodecRangeError:
            for start, before in reversed(self._overwritten):
                batch.memory[start : start + before.size] = before
            self._batch = None
            raise

    def mlp_block(self, block: _Mlp, hidden: F32) -> None:
        for row in hidden:
            x = _rms_norm(_row(row), block.norm, block.eps)
            gate = torch.mv(block.gate, x)
            row += torch.mv(block.down, gate * torch.sigmoid(gate) * torch.mv(block.up, x)).numpy()

    def head(self, head: _Head, hidden: F32, rows: Sequence[int] | I32) -> F32:
        out = np.empty((len(rows), head.weight.shape[0]), dtype=np.float32)
        for i, r in enumerate(rows):
            out[i] = torch.mv(head.weight, _rms_norm(_row(hidden[r]), head.norm, head.eps)).numpy()
        return out

    def log_softmax(self, logits: F32) -> F32:
        out = np.empty_like(logits)
        for i, row in enumerate(logits):
            out[i] = torch.log_softmax(_row(row), dim=-1).numpy()
        return out

    def sample(self, logits: F32, sampling: Sampling) -> I32:
        out = np.empty(len(logits), dtype=np.int32)
        for i, row in enumerate(logits):
            out[i] = _sample(
                row.astype(np.float64),
                float(sampling.temperature[i]),
                int(sampling.top_k[i]),
                float(sampling.top_p[i]),
                float(sampling.min_p[i]),
                float(sampling.uniform[i]),
            )
        return out

    def forget(self) -> None:
        self._batch, self._overwritten = None, []

    def _attend_segment(self, block: _Attention, hidden: F32, batch: Batch, s: int) -> None:
        spec, size = block.spec, block.page_size
        first, last = int(batch.row_start[s]), int(batch.row_start[s + 1])
        position = int(batch.position[s])
        entries = range(int(batch.entry_start[s]), int(batch.entry_start[s + 1]))
        offsets = [int(batch.page_offset[e]) for e in entries]
        formats = [self._formats[int(batch.page_format[e])] for e in entries]

        # Exact keys and values of every page that the segment touches, [pages, page_size, heads, dim].
        first_page = position // size
        n_pages = -(-(position + last - first) // size) - first_page
        exact_k = np.zeros((n_pages, size, spec.n_kv_heads, spec.head_dim), dtype=np.float32)
        exact_v = np.zeros_like(exact_k)
        opened = int(batch.open_offset[s])
        if position % size:
            exact_k[0, : position % size] = _read(block.keys, batch.memory, opened)[: position % size]
            exact_v[0, : position % size] = _read(block.values, batch.memory, opened)[: position % size]
        queries = []
        for i in range(last - first):
            q, k, v = self._project(block, hidden[first + i], position + i)
            slot = position + i - first_page * size
            exact_k[slot // size, slot % size] = k.numpy()
            exact_v[slot // size, slot % size] = v.numpy()
            queries.append(q)

        for p in range(first_page, (position + last - first) // size):
            _write(formats[p].planes[Role.KEY][block.layer], batch.memory, offsets[p], exact_k[p - first_page])
            _write(formats[p].planes[Role.VALUE][block.layer], batch.memory, offsets[p], exact_v[p - first_page])
        if (position + last - first) % size:
            for placed, exact in ((block.keys, exact_k), (block.values, exact_v)):
                start = opened + placed.offset
                self._overwritten.append((start, batch.memory[start : start + placed.n_bytes].copy()))
                _write(placed, batch.memory, opened, exact[-1])

        sealed = [
            tuple(_read(f.planes[role][block.layer], batch.memory, o) for role in (Role.KEY, Role.VALUE))
            for f, o in zip(formats, offsets, strict=True)
        ]
        for i, q in enumerate(queries):
            page, slot = divmod(position + i, size)
            own = (exact_k[page - first_page, : slot + 1], exact_v[page - first_page, : slot + 1])
            seen = [*sealed[:page], own]
            keys = torch.from_numpy(np.concatenate([k for k, _ in seen]))
            values = torch.from_numpy(np.concatenate([v for _, v in seen]))
            hidden[first + i] += torch.mv(block.o, _attend(q, keys, values)).numpy()

    def _project(self, block: _Attention, row: F32, position: int) -> tuple[T, T, T]:
        spec = block.spec
        x = _rms_norm(_row(row), block.norm, spec.norm_eps)
        q, k, v = torch.mv(block.q, x), torch.mv(block.k, x), torch.mv(block.v, x)
        if block.q_bias is not None and block.k_bias is not None and block.v_bias is not None:
            q, k, v = q + block.q_bias, k + block.k_bias, v + block.v_bias
        q, k = q.view(spec.n_heads, spec.head_dim), k.view(spec.n_kv_heads, spec.head_dim)
        if block.q_norm is not None and block.k_norm is not None:
            q, k = _rms_norm(q, block.q_norm, spec.norm_eps), _rms_norm(k, block.k_norm, spec.norm_eps)
        cos, sin = block.cos[position], block.sin[position]
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v.view(spec.n_kv_heads, spec.head_dim)


def _sample(row: F64, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    best = int(row.argmax())  # of a NaN, where there is one
    if not math.isfinite(row[best]):
        return -1
    if temperature == 0:
        return best
    weights = np.exp((row - row[best]) / temperature)
    kept = np.argsort(-row, kind="stable")
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        cumulative = np.cumsum(weights[kept])
        kept = kept[: np.searchsorted(cumulative, top_p * cumulative[-1]) + 1]
    if min_p > 0:
        kept = kept[row[kept] >= row[best] + temperature * math.log(min_p)]
    kept = np.sort(kept)
    cumulative = np.cumsum(weights[kept])
    return int(kept[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])


def _row(row: F32) -> T:
    # A copy: the result of a product may depend on its operands' alignment, and rows of an array differ in theirs.
    return torch.from_numpy(row.copy())


def _rotate(x: T, cos: T, sin: T) -> T:
    """x: [heads, dim]; channel i turns with channel i + dim / 2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _attend(q: T, keys: T, values: T) -> T:
    """q [heads, dim], keys and values [tokens, kv_heads, dim] -> [heads * dim]."""
    n_heads, dim = q.shape
    group = n_heads // keys.shape[1]
    out = torch.empty_like(q)
    for h in range(n_heads):
        scores = torch.mv(keys[:, h // group].contiguous(), q[h].clone()) / math.sqrt(dim)
        out[h] = torch.mv(values[:, h // group].t().contiguous(), torch.softmax(scores, dim=0))
    return out.flatten()


def _read(placed: PlacedPlane, memory: U8, page_offset: int) -> F32:
    start = page_offset + placed.offset
    return placed.codec.decode(memory[start : start + placed.n_bytes], placed.plane)


def _write(placed: PlacedPlane, memory: U8, page_offset: int, values: F32) -> None:
    start = page_offset + placed.offset
    memory[start : start + placed.n_bytes] = placed.codec.encode(values, placed.plane)
