"""The oracle: plain float32 torch, one row at a time, readable before all else.

Every row is computed alone, so nothing can depend on batch mates or chunking; sealed pages are read through the numpy
codecs that define their bytes. Slow by design. Needs the `torch` extra.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor as T

from octavo.cache.format import PageFormat, PlacedPlane, open_format
from octavo.cache.spec import CacheGroup
from octavo.codecs.base import Role
from octavo.errors import CodecRangeError
from octavo.models.loading.dequant import dequantize
from octavo.models.rope import rope_tables
from octavo.models.spec import AttentionWeights, MlpWeights, ModelSpec, Tensor
from octavo.ops.base import Batch, Sampling
from octavo.ops.host_store import HostStore, host_memory
from octavo.ops.lists import check_batch

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
    group: int  # of the model's cache groups
    index: int  # of the layer within its group
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
    #: Nothing is shared here, so nothing is refused.
    cascade_refused = 0

    def __init__(self) -> None:
        self._formats: dict[int, list[PageFormat]] = {}  # by cache group
        self._groups: tuple[CacheGroup, ...] = ()
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
        self._groups = spec.cache_spec().groups
        group, index = spec.cache_spec().group_of(layer)
        opened = open_format(spec.cache_spec().groups[group], page_size)
        norm = _vector(weights.norm)
        assert norm is not None
        return _Attention(
            spec=spec, group=group, index=index, page_size=page_size, keys=opened.planes[Role.KEY][index],
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

    def add_format(self, group: int, fmt: PageFormat) -> int:
        formats = self._formats.setdefault(group, [])
        formats.append(fmt)
        return len(formats) - 1

    def new_store(self, n_bytes: int) -> HostStore:
        return HostStore(n_bytes)

    def embed(self, embedding: T, tokens: I32) -> F32:
        result: F32 = embedding[torch.from_numpy(tokens.astype(np.int64))].numpy()
        return result

    def attention_block(self, block: _Attention, hidden: F32, batch: Batch) -> None:
        if batch is not self._batch:
            for i, group in enumerate(self._groups):
                opened = open_format(group, block.page_size)
                n_lists = len(group.layers) * block.spec.n_kv_heads
                check_batch(batch, batch.groups[i], self._formats[i], opened, n_lists)
            self._batch, self._overwritten = batch, []
        try:
            for s in range(len(batch.position)):
                self._attend_segment(block, hidden, batch, s)
        except CodecRangeError:
            for start, before in reversed(self._overwritten):
                host_memory(batch.store)[start : start + before.size] = before
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
        spec, size, memory = block.spec, block.page_size, host_memory(batch.store)
        group, formats = batch.groups[block.group], self._formats[block.group]
        first, last = int(batch.row_start[s]), int(batch.row_start[s + 1])
        position = int(batch.position[s])

        # Exact keys and values of every page that the segment touches, [pages, page_size, heads, dim].
        first_page = position // size
        n_pages = -(-(position + last - first) // size) - first_page
        exact_k = np.zeros((n_pages, size, spec.n_kv_heads, spec.head_dim), dtype=np.float32)
        exact_v = np.zeros_like(exact_k)
        opened = int(group.open_offset[s])
        if position % size:
            exact_k[0, : position % size] = _read(block.keys, memory, opened)[: position % size]
            exact_v[0, : position % size] = _read(block.values, memory, opened)[: position % size]
        queries = []
        for i in range(last - first):
            q, k, v = self._project(block, hidden[first + i], position + i)
            slot = position + i - first_page * size
            exact_k[slot // size, slot % size] = k.numpy()
            exact_v[slot // size, slot % size] = v.numpy()
            queries.append(q)

        # What each head reads, as entries of the group.
        lists = [group.entries_of(s, block.index, head, spec.n_kv_heads) for head in range(spec.n_kv_heads)]

        def sealed_planes(entry: int) -> tuple[PlacedPlane, PlacedPlane, int]:
            """Keys and values of this layer in an entry's page, and the page's offset."""
            planes = formats[group.page_format[entry]].planes
            return planes[Role.KEY][block.index], planes[Role.VALUE][block.index], int(group.page_offset[entry])

        for page in range(first_page, (position + last - first) // size):
            for head, entries in enumerate(lists):
                (entry,) = (e for e in entries if group.position[e] == page * size)
                keys, values, offset = sealed_planes(entry)
                _write_head(keys, memory, offset, head, exact_k[page - first_page])
                _write_head(values, memory, offset, head, exact_v[page - first_page])
        if (position + last - first) % size:
            for placed, exact in ((block.keys, exact_k), (block.values, exact_v)):
                self._overwritten.append((opened + placed.offset, _plane_bytes(placed, memory, opened).copy()))
                _write(placed, memory, opened, exact[-1])

        # The entries as they read back, [tokens, dim] each.
        sealed: list[list[tuple[F32, F32]]] = []
        for head, entries in enumerate(lists):
            sealed.append([])
            for entry in entries:
                keys, values, offset = sealed_planes(entry)
                n = int(group.n_tokens[entry])
                key, value = (_read_head(placed, memory, offset, head, n) for placed in (keys, values))
                sealed[head].append((key, value))

        for i, q in enumerate(queries):
            page, slot = divmod(position + i, size)
            attended = []
            for head, queries_of_head in enumerate(q.chunk(spec.n_kv_heads)):
                entries = lists[head]
                before = sum(group.position[e] < page * size for e in entries)
                own = (exact_k[page - first_page, : slot + 1, head], exact_v[page - first_page, : slot + 1, head])
                seen = [*sealed[head][:before], own]
                attended.append(_attend(queries_of_head, _joined(k for k, _ in seen), _joined(v for _, v in seen)))
            hidden[first + i] += torch.mv(block.o, torch.cat(attended).flatten()).numpy()

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


def _joined(parts: Iterable[F32]) -> T:
    """[tokens, dim] each -> all of them; a copy for the same reason."""
    return torch.from_numpy(np.concatenate(list(parts))).clone()


def _rotate(x: T, cos: T, sin: T) -> T:
    """x: [heads, dim]; channel i turns with channel i + dim / 2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _attend(q: T, keys: T, values: T) -> T:
    """q [queries, dim], keys and values [tokens, dim] of the KV head that they share -> [queries, dim]."""
    out = torch.empty_like(q)
    for i, query in enumerate(q):
        scores = torch.mv(keys, query.clone()) / math.sqrt(q.shape[1])
        out[i] = torch.mv(values.t().contiguous(), torch.softmax(scores, dim=0))
    return out


def _plane_bytes(placed: PlacedPlane, memory: U8, page_offset: int) -> U8:
    """The plane's bytes in the arena, to read or to write."""
    start = page_offset + placed.offset
    return memory[start : start + placed.n_bytes]


def _read(placed: PlacedPlane, memory: U8, page_offset: int) -> F32:
    return placed.codec.decode(_plane_bytes(placed, memory, page_offset), placed.plane)


def _write(placed: PlacedPlane, memory: U8, page_offset: int, values: F32) -> None:
    _plane_bytes(placed, memory, page_offset)[:] = placed.codec.encode(values, placed.plane)


def _read_head(placed: PlacedPlane, memory: U8, page_offset: int, head: int, n_tokens: int) -> F32:
    """One head's first n_tokens tokens, [n_tokens, dim]. Other heads' bytes and other tokens' are not looked at."""
    data = _plane_bytes(placed, memory, page_offset)[placed.codec.head_bytes(placed.plane)[head]]
    return placed.codec.decode(data, placed.plane.head(head), n_tokens)[:, 0]


def _write_head(placed: PlacedPlane, memory: U8, page_offset: int, head: int, values: F32) -> None:
    """values [page_size, heads, dim], of which one head is written."""
    data = placed.codec.encode(np.ascontiguousarray(values[:, head : head + 1]), placed.plane.head(head))
    _plane_bytes(placed, memory, page_offset)[placed.codec.head_bytes(placed.plane)[head]] = data
