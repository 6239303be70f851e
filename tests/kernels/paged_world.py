"""A small arena with sequences in it, for testing attention over pages, and a plain numpy account of the
right answer.

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
from octavo.codecs.base import Role

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


@dataclass
class Seq:
    """A sequence: projected rows of all its tokens, and its pages."""

    qkv: F32  # [n_layers, n_tokens, width]
    format_of: Callable[[int], int]  # page index -> format id
    position: int = 0
    pages: list[int] = field(default_factory=list)
    open_offset: int = -1
    out: list[F32] = field(default_factory=list)  # per step, [n_layers, n, n_heads * head_dim]

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
    ) -> None:
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
        raw = np.full(stride * pages + GUARD + 64, 0xFF, np.uint8)
        base = -raw.ctypes.data % 64
        self.memory = raw[base : base + stride * pages + GUARD]
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
        row_start, entry_start, position, open_offset = [0], [0], [], []
        offsets: list[int] = []
        formats: list[int] = []
        for seq, n in work:
            stop = seq.position + n
            while len(seq.pages) < stop // size:
                seq.pages.append(self.alloc(self.formats[seq.format_of(len(seq.pages))]))
            row_start.append(row_start[-1] + n)
            position.append(seq.position)
            offsets += seq.pages
            formats += [seq.format_of(i) for i in range(len(seq.pages))]
            entry_start.append(len(offsets))
            edges = seq.position % size == 0 and stop % size == 0
            open_offset.append(-1 if edges and self.rng.random() < 0.5 else seq.open_offset)
        return {
            "row_start": np.array(row_start, np.int32),
            "position": np.array(position, np.int32),
            "entry_start": np.array(entry_start, np.int32),
            "page_offset": np.array(offsets, np.int64),
            "page_format": np.array(formats, np.uint8),
            "open_offset": np.array(open_offset, np.int64),
        }

    def build(self, arrays: dict[str, Any]) -> Any:
        step = _cpu.Step(self.cache)
        step.assign(self.context, self.memory, cosine=self.cos, sine=self.sin, **arrays)
        return step

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
    """The definition, token by token in float64: sealed pages before a token's own, its own exactly.

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
            scores = q[t, head * g : (head + 1) * g] @ seen_k.T * shape.scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[t, head * g : (head + 1) * g] = weights @ seen_v / weights.sum(axis=1, keepdims=True)
    return out.reshape(n_tokens, -1), keys, values
