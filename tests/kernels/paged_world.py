"""A small arena with sequences in it, for testing attention over pages, and a plain numpy account of the
right answer.

A sequence may be pruned: its heads then read lists of their own, with entries missing, and with ragged pages into which
the kept tokens have been moved. The account of the right answer has an explicit mask and the values as they read back.

Memory starts as 0xFF bytes, which read as NaN in every float type, so whatever is read without having been
written shows. Pages lie in shuffled places with gaps between them, and every run ends by checking that the
gaps are untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import octavo.ops._cpu as _cpu
from numpy.typing import NDArray

from octavo.cache.format import Form, PageFormat, build_format, open_format
from octavo.cache.spec import FullGroup
from octavo.codecs.base import Plane, Role
from octavo.codecs.int4 import _pack, _unpack
from octavo.codecs.layout import stored_shape
from octavo.ops.base import Batch, GroupEntries
from octavo.ops.host_store import HostStore

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

GUARD = 192
SPLIT_PAGES = 8


@dataclass(frozen=True)
class Shape:
    page_size: int = 32
    n_kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    n_layers: int = 1
    key_bias: bool = False

    @property
    def width(self) -> int:
        return (self.group + 2) * self.n_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))


def planes(fmt: PageFormat) -> dict[str, Any]:
    return {
        "keys": [(p.codec.kernel_id, p.codec.rotates(p.plane), p.offset) for p in fmt.planes[Role.KEY]],
        "values": [(p.codec.kernel_id, p.codec.rotates(p.plane), p.offset) for p in fmt.planes[Role.VALUE]],
        "page_bytes": fmt.page_bytes,
    }


@dataclass(frozen=True)
class Entry:
    offset: int
    format: int
    position: int
    n_tokens: int


@dataclass
class Pruned:
    """What is left of a sequence's tokens before position `end`: which are kept, [n_layers, n_kv_heads, end], and the
    keys and values that these read back as, [n_layers, n_kv_heads, end, head_dim]."""

    end: int
    keep: NDArray[np.bool_]
    keys: F32
    values: F32


@dataclass
class Seq:
    """A sequence: projected rows of all its tokens, and its pages."""

    qkv: F32  # [n_layers, n_tokens, width]
    format_of: Callable[[int], int]  # page index -> format id
    position: int = 0
    pages: list[int] = field(default_factory=list)
    open_offset: int = -1
    out: list[F32] = field(default_factory=list)  # per step, [n_layers, n, n_heads * head_dim]
    lists: list[list[Entry]] | None = None  # once pruned: one, or one per layer and head
    pruned: Pruned | None = None

    def outputs(self) -> F32:
        return np.concatenate(self.out, axis=1)


class World:
    def __init__(
        self,
        shape: Shape,
        formats: Sequence[tuple[str, str]],
        *,
        threads: int = 1,
        isa: str = "auto",
        pages: int = 64,
        seed: int = 0,
        max_positions: int = 4096,
        rope: tuple[F32, F32] | None = None,
        partial_bytes: int = 64 << 20,
    ) -> None:
        self.partial_bytes = partial_bytes
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.context = _cpu.Context(threads, isa)
        layers = tuple(range(shape.n_layers))
        spec = FullGroup(layers, shape.n_kv_heads, shape.head_dim, key_bias=shape.key_bias)
        self.open_format = open_format(spec, shape.page_size)
        self.formats = [build_format(spec, shape.page_size, Form(k, v)) for k, v in formats]
        self.cache = _cpu.CacheLayout(
            self.context,
            shape.page_size,
            shape.n_kv_heads,
            shape.head_dim,
            shape.group,
            SPLIT_PAGES,
            **planes(self.open_format),
        )
        for i, fmt in enumerate(self.formats):
            assert self.cache.add_format(self.context, **planes(fmt)) == i
        biggest = max(f.page_bytes for f in (self.open_format, *self.formats))
        stride = -(-(biggest + GUARD) // 64) * 64
        self.store = HostStore(stride * pages + GUARD)
        self.memory = self.store.memory
        self.memory[:] = 0xFF
        self.free = [int(i) * stride + GUARD for i in self.rng.permutation(pages)]
        self.owned = np.zeros(self.memory.size, bool)
        identity = (
            np.ones((max_positions, shape.head_dim // 2), np.float32),
            np.zeros((max_positions, shape.head_dim // 2), np.float32),
        )
        self.cos, self.sin = rope or identity
        self.q_norm: F32 | None = None
        self.k_norm: F32 | None = None

    def alloc(self, fmt: PageFormat) -> int:
        offset = self.free.pop()
        self.owned[offset : offset + fmt.page_bytes] = True
        return offset

    def sequence(self, n_tokens: int, format_of: Callable[[int], int] = lambda page: 0, seed: int = 0) -> Seq:
        rng = np.random.default_rng(seed)
        shape = self.shape
        qkv = rng.standard_normal((shape.n_layers, n_tokens, shape.width)).astype(np.float32)
        qkv[:, :, : shape.group * shape.n_kv_heads * shape.head_dim] *= 2  # sharper attention than noise gives
        return Seq(qkv, format_of, open_offset=self.alloc(self.open_format))

    def fork(self, seq: Seq, n_pages: int, n_tokens: int, seed: int) -> Seq:
        """Another sequence that has the first n_pages of `seq`, and n_tokens of its own behind them."""
        other = self.sequence(n_pages * self.shape.page_size + n_tokens, seq.format_of, seed)
        other.position = n_pages * self.shape.page_size
        other.qkv[:, : other.position] = seq.qkv[:, : other.position]
        other.pages = seq.pages[:n_pages]
        return other

    def arrays(self, work: Sequence[tuple[Seq, int]]) -> dict[str, Any]:
        """The batch of `work`, [(sequence, tokens)], as attend takes it. Allocates the pages that it
        completes."""
        size = self.shape.page_size
        row_start, first_list, entry_start, position, open_offset = [0], [0], [0], [], []
        entries: list[Entry] = []
        for seq, n in work:
            stop = seq.position + n
            while len(seq.pages) < stop // size:
                page = len(seq.pages)
                seq.pages.append(self.alloc(self.formats[seq.format_of(page)]))
                for i, entry_list in enumerate(seq.lists or []):
                    # Some heads seal into pages of their own.
                    own = seq.pages[page] if i % 3 < 2 else self.alloc(self.formats[seq.format_of(page)])
                    entry_list.append(Entry(own, seq.format_of(page), page * size, size))
            row_start.append(row_start[-1] + n)
            position.append(seq.position)
            lists = seq.lists or [[Entry(o, seq.format_of(i), i * size, size) for i, o in enumerate(seq.pages)]]
            for entry_list in lists:
                entries += entry_list
                entry_start.append(len(entries))
            first_list.append(first_list[-1] + len(lists))
            edges = seq.position % size == 0 and stop % size == 0
            open_offset.append(-1 if edges and self.rng.random() < 0.5 else seq.open_offset)
        return {
            "row_start": np.array(row_start, np.int32),
            "position": np.array(position, np.int32),
            "first_list": np.array(first_list, np.int32),
            "entry_start": np.array(entry_start, np.int32),
            "page_offset": np.array([e.offset for e in entries], np.int64),
            "page_format": np.array([e.format for e in entries], np.uint8),
            "entry_position": np.array([e.position for e in entries], np.int32),
            "n_tokens": np.array([e.n_tokens for e in entries], np.int32),
            "open_offset": np.array(open_offset, np.int64),
        }

    def batch(self, work: Sequence[tuple[Seq, int]]) -> Batch:
        """The same for a backend."""
        arrays = self.arrays(work)
        rows = {name: arrays.pop(name) for name in ("row_start", "position")}
        group = GroupEntries(position=arrays.pop("entry_position"), **arrays)
        tokens = np.zeros(sum(n for _, n in work), np.int32)
        return Batch(store=self.store, tokens=tokens, groups=(group,), **rows)

    def prune(self, seq: Seq, *, per_head: bool, seed: int = 0, most: int | None = None) -> None:
        """Keep some of the tokens before the sequence's open page: in each list some of its pages as they are, and of
        others' tokens some, moved to pages of up to `most` tokens whose other slots are as bad as can be."""
        rng, shape = np.random.default_rng(seed), self.shape
        size, heads, d = shape.page_size, shape.n_kv_heads, shape.head_dim
        end = seq.position // size * size
        where = (shape.n_layers, heads, end)
        seq.pruned = Pruned(
            end,
            np.zeros(where, bool),
            np.full((*where, d), np.nan, np.float32),
            np.full((*where, d), np.nan, np.float32),
        )
        # Moved tokens of all lists share pages, as far as these go: each head has its own part of a page.
        shared: list[tuple[int, int]] = []
        seq.lists = []
        each = [(layer, head) for layer in range(shape.n_layers) for head in range(heads)]
        for members in [[at] for at in each] if per_head else [each]:
            entries: list[Entry] = []
            page, n_moved = 0, 0
            while page < end // size:
                kind = rng.choice(["keep", "drop", "move", "move"])
                run = 1 if kind != "move" else int(rng.integers(1, 4))
                stop = min(page + run, end // size)
                candidates = np.arange(page * size, stop * size)
                if kind == "keep":
                    entries.append(Entry(seq.pages[page], seq.format_of(page), page * size, size))
                    for layer, head in members:
                        self._note(seq, layer, head, candidates, *self._read(seq, layer, head, page))
                elif kind == "move":
                    kept = candidates[rng.random(candidates.size) < rng.choice([0.1, 0.5])]
                    while kept.size:
                        n = min(int(rng.integers(1, (most or size) + 1)), kept.size)
                        if n_moved == len(shared) or rng.random() < 0.2:
                            fmt = int(rng.integers(len(self.formats)))
                            shared.insert(n_moved, (self.alloc(self.formats[fmt]), fmt))
                        offset, fmt = shared[n_moved]
                        for layer, head in members:
                            self._move(seq, layer, head, kept[:n], offset, fmt)
                        entries.append(Entry(offset, fmt, int(kept[0]), n))
                        kept, n_moved = kept[n:], n_moved + 1
                page = stop
            seq.lists.append(entries)

    def _note(self, seq: Seq, layer: int, head: int, at: NDArray[Any], keys: F32, values: F32) -> None:
        assert seq.pruned is not None
        seq.pruned.keep[layer, head, at] = True
        seq.pruned.keys[layer, head, at] = keys
        seq.pruned.values[layer, head, at] = values

    def _read(self, seq: Seq, layer: int, head: int, page: int) -> tuple[F32, F32]:
        """A head's keys and values as a page of the sequence has them, [page_size, head_dim]."""
        result = []
        for role in (Role.KEY, Role.VALUE):
            placed = self.formats[seq.format_of(page)].planes[role][layer]
            start = seq.pages[page] + placed.offset
            result.append(placed.codec.decode(self.memory[start : start + placed.n_bytes], placed.plane)[:, head])
        return result[0], result[1]

    def _move(self, seq: Seq, layer: int, head: int, at: NDArray[Any], offset: int, fmt: int) -> None:
        """Write a head's tokens from positions `at` to a page's first slots; the other slots' bytes become 0xFF."""
        size, read_back = self.shape.page_size, []
        for i, role in enumerate((Role.KEY, Role.VALUE)):
            placed = self.formats[fmt].planes[role][layer]
            plane, codec = placed.plane.head(head), placed.codec
            rows = [self._read(seq, layer, head, int(p) // size)[i][int(p) % size] for p in at]
            rows += [rows[-1]] * (size - len(rows))
            data = codec.encode(np.stack(rows)[:, None], plane)
            read_back.append(codec.decode(data, plane)[: len(at), 0])
            where = offset + placed.offset + codec.head_bytes(placed.plane)[head]
            self.memory[where] = poisoned(data, codec.name, plane, len(at))
        self._note(seq, layer, head, at, *read_back)

    def build(self, arrays: dict[str, Any]) -> Any:
        step = _cpu.Step(self.cache, self.partial_bytes)
        self.assign(step, arrays)
        return step

    def assign(self, step: Any, arrays: dict[str, Any]) -> None:
        step.assign(self.context, self.memory, cosine=self.cos, sine=self.sin, **arrays)

    def step(self, *work: tuple[Seq, int]) -> None:
        """Run the next n tokens of each sequence through all layers."""
        step = self.build(self.arrays(work))
        n = sum(n for _, n in work)
        heads = self.shape.group * self.shape.n_kv_heads * self.shape.head_dim
        out = np.full((self.shape.n_layers, n, heads), np.nan, np.float32)
        for layer in range(self.shape.n_layers):
            qkv = np.concatenate([s.qkv[layer, s.position : s.position + n] for s, n in work])
            _cpu.attend(
                self.context,
                step,
                layer,
                self.shape.scale,
                qkv,
                out[layer],
                q_norm=self.q_norm,
                k_norm=self.k_norm,
                norm_eps=1e-6,
            )
        row = 0
        for seq, count in work:
            seq.out.append(out[:, row : row + count])
            seq.position += count
            row += count

    def check_gaps(self) -> None:
        assert (self.memory[~self.owned] == 0xFF).all(), "bytes outside the pages were written"

    def run(self, seq: Seq, chunks: Sequence[int]) -> F32:
        for n in chunks:
            self.step((seq, n))
        self.check_gaps()
        return seq.outputs()

    def sealed(self, seq: Seq, page: int) -> U8:
        fmt = self.formats[seq.format_of(page)]
        used = np.concatenate([np.arange(p.offset, p.offset + p.n_bytes) for p in fmt.all_planes()])
        return self.memory[seq.pages[page] + used]


def poisoned(data: U8, codec: str, plane: Plane, n_tokens: int) -> U8:
    """One head's bytes with all those of slots from n_tokens on set to 0xFF: codes, scales and minima."""
    n, keys, data = plane.n_values, plane.role is Role.KEY, data.copy()
    _, rows, length = stored_shape(plane)
    unused = slice(n_tokens, None)
    if codec not in ("int8", "int4"):
        values = data.reshape(rows, length, -1)
        values[(slice(None), unused) if keys else unused] = 0xFF
        return data
    n_codes = n if codec == "int8" else n // 2
    packed = data[:n_codes].reshape(1, rows // 2, -1)
    codes = (packed.copy() if codec == "int8" else _unpack(packed)).reshape(rows // 2, length, 2)
    if keys:
        codes[:, unused] = 0xFF
    else:
        for token in range(n_tokens, plane.page_size):
            codes[token // 2, :, token % 2] = 0xFF
        data[n_codes:].view(np.uint16).reshape(-1, rows)[:, unused] = 0xFFFF
    codes = codes.reshape(1, rows // 2, -1)
    data[:n_codes] = (codes if codec == "int8" else _pack(codes & 15)).reshape(-1)
    return data


def rotate_half(x: F64, cos: F32, sin: F32) -> F64:
    """x [tokens, heads, d], tables [tokens, dim / 2]: channels i and i + dim / 2 turn by the token's
    angle."""
    half = cos.shape[1]
    c, s = cos[:, None, :].astype(np.float64), sin[:, None, :].astype(np.float64)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate((a * c - b * s, b * c + a * s, x[..., 2 * half :]), axis=-1)


def rms_norm(x: F64, weight: F32 | None) -> F64:
    if weight is None:
        return x
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def reference(world: World, seq: Seq, layer: int, n_tokens: int) -> tuple[F64, F32, F32]:
    """The definition, token by token in float64: sealed pages before a token's own, its own exactly. Of a pruned
    sequence the tokens that were kept, which is right for those that came after the pruning.

    Returns the outputs [n_tokens, n_heads * head_dim] and the exact keys and values [n_tokens, n_kv_heads,
    head_dim].
    """
    shape = world.shape
    h, g, d, size = shape.n_kv_heads, shape.group, shape.head_dim, shape.page_size
    rows = seq.qkv[layer, :n_tokens].astype(np.float64)
    q, k, v = np.split(rows, [g * h * d, (g + 1) * h * d], axis=1)
    cos, sin = world.cos[:n_tokens], world.sin[:n_tokens]
    q = rotate_half(rms_norm(q.reshape(-1, h * g, d), world.q_norm), cos, sin)
    keys = rotate_half(rms_norm(k.reshape(-1, h, d), world.k_norm), cos, sin).astype(np.float32)
    values = v.reshape(-1, h, d).astype(np.float32)

    sealed_k, sealed_v = keys.astype(np.float64), values.astype(np.float64)
    for page in range(n_tokens // size):
        span = slice(page * size, (page + 1) * size)
        fmt = world.formats[seq.format_of(page)]
        for placed, exact, to in (
            (fmt.planes[Role.KEY][layer], keys, sealed_k),
            (fmt.planes[Role.VALUE][layer], values, sealed_v),
        ):
            codec, plane = placed.codec, placed.plane
            decoded = codec.decode(codec.encode(np.ascontiguousarray(exact[span]), plane), plane)
            to[span] = decoded

    out = np.empty((n_tokens, h * g, d))
    for t in range(n_tokens):
        own = t // size * size
        for head in range(h):
            seen_k = np.concatenate((sealed_k[:own, head], keys[own : t + 1, head]))
            seen_v = np.concatenate((sealed_v[:own, head], values[own : t + 1, head]))
            if seq.pruned is not None and own >= (end := seq.pruned.end):
                keep = np.concatenate((seq.pruned.keep[layer, head], np.ones(t + 1 - end, bool)))
                seen_k = np.concatenate((seq.pruned.keys[layer, head], seen_k[end:]))[keep]
                seen_v = np.concatenate((seq.pruned.values[layer, head], seen_v[end:]))[keep]
            scores = q[t, head * g : (head + 1) * g] @ seen_k.T * shape.scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[t, head * g : (head + 1) * g] = weights @ seen_v / weights.sum(axis=1, keepdims=True)
    return out.reshape(n_tokens, -1), keys, values
