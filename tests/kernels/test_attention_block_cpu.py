"""The whole attention block through the backend's Python side: norm, projections, bias, head norms, rotary
embedding, pages, output projection and residual."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import octavo.ops._cpu as _cpu
import pytest

from octavo.cache.format import Form, build_format
from octavo.errors import CodecRangeError, LoadError, UnsupportedError
from octavo.models.rope import rope_tables
from octavo.models.spec import AttentionWeights, ModelSpec, RopeScaling, RopeSpec, Tensor
from octavo.ops.cpu_attention import CpuAttention

from .paged_world import F32, Seq, Shape, World, reference

D_MODEL = 96


def spec_of(shape: Shape, *, qkv_bias: bool = False, qk_norm: bool = False, rope: RopeSpec | None = None) -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        vocab_size=8,
        d_model=D_MODEL,
        n_layers=shape.n_layers,
        n_heads=shape.group * shape.n_kv_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        d_ff=8,
        norm_eps=1e-6,
        context_length=65536,
        rope=rope or RopeSpec(10000.0, shape.head_dim),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def tensor(name: str, values: F32, dtype: str) -> Tensor:
    kind = gguf.GGMLQuantizationType[dtype]
    data = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(-1)
    return Tensor(name, dtype, *values.shape, data)


def weights_of(spec: ModelSpec, dtype: str, seed: int = 0) -> tuple[AttentionWeights, dict[str, F32]]:
    """Random weights, and the matrices as they read back."""
    rng = np.random.default_rng(seed)
    width, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim

    def vector(n: int) -> F32:
        return rng.uniform(0.5, 1.5, n).astype(np.float32)

    tensors, dense = {}, {}
    for name, rows, cols in (
        ("q", width, D_MODEL),
        ("k", kv, D_MODEL),
        ("v", kv, D_MODEL),
        ("o", D_MODEL, width),
    ):
        values = (rng.standard_normal((rows, cols)) * cols**-0.5).astype(np.float32)
        tensors[name] = tensor(name, values, dtype)
        kind = gguf.GGMLQuantizationType[dtype]
        dense[name] = gguf.quants.dequantize(tensors[name].data.reshape(rows, -1), kind).reshape(rows, cols)
    biases: dict[str, Any] = {}
    if spec.qkv_bias:
        biases = {n: rng.standard_normal(m).astype(np.float32) for n, m in zip(
            ("q_bias", "k_bias", "v_bias"), (width, kv, kv), strict=True)}  # fmt: skip
    if spec.qk_norm:
        biases |= {"q_norm": vector(spec.head_dim), "k_norm": vector(spec.head_dim)}
    return AttentionWeights(norm=vector(D_MODEL), **tensors, **biases), dense


class Block:
    """One model's blocks, run over a World's arena."""

    def __init__(
        self,
        spec: ModelSpec,
        shape: Shape,
        weights: AttentionWeights,
        codecs: list[tuple[str, str]],
        threads: int = 1,
    ) -> None:
        self.world = World(shape, codecs, threads=threads)
        self.ops = CpuAttention(self.world.context)
        formats = [build_format(spec.cache_spec().groups[0], shape.page_size, Form(k, v)) for k, v in codecs]
        early, late = formats[: len(formats) // 2], formats[len(formats) // 2 :]
        ids = [self.ops.add_format(0, f) for f in early]  # before the model is known, and after
        self.blocks = [self.ops.prepare(spec, i, weights, shape.page_size) for i in range(shape.n_layers)]
        ids += [self.ops.add_format(0, f) for f in late]
        assert ids == list(range(len(formats)))
        assert [self.ops.add_format(0, f) for f in formats] == ids

    def sequence(self, hidden: F32, format_of: Any = lambda page: 0) -> Seq:
        """hidden [n_layers, n, d_model]"""
        return Seq(hidden, format_of, open_offset=self.world.alloc(self.world.open_format))

    def step(self, *work: tuple[Seq, int]) -> None:
        batch = self.world.batch(work)
        out = np.stack([np.concatenate([s.qkv[i, s.position : s.position + n] for s, n in work])
                        for i in range(len(self.blocks))])  # fmt: skip
        for block, hidden in zip(self.blocks, out, strict=True):
            self.ops.run(block, hidden, batch)
        row = 0
        for seq, n in work:
            seq.out.append(out[:, row : row + n])
            seq.position += n
            row += n
        self.world.check_gaps()


def expected(world: World, spec: ModelSpec, weights: AttentionWeights, dense: dict[str, F32], seq: Seq) -> F32:
    """The block in float64 for layer 0: [n, d_model]."""
    hidden = seq.qkv[0].astype(np.float64)
    x = hidden / np.sqrt(np.mean(hidden**2, axis=1, keepdims=True) + spec.norm_eps) * weights.norm
    qkv = x @ np.concatenate([dense["q"], dense["k"], dense["v"]]).T.astype(np.float64)
    if weights.q_bias is not None:
        qkv += np.concatenate([weights.q_bias, weights.k_bias, weights.v_bias])
    world.q_norm, world.k_norm = weights.q_norm, weights.k_norm
    world.cos, world.sin = rope_tables(spec.rope, len(hidden))
    projected = Seq(qkv[None].astype(np.float32), seq.format_of, pruned=seq.pruned)
    attended, _, _ = reference(world, projected, 0, len(hidden))
    return hidden + attended @ dense["o"].T.astype(np.float64)


VARIANTS = {
    "llama": {},
    "bias": {"qkv_bias": True},
    "head norms": {"qk_norm": True},
    "yarn": {"rope": RopeSpec(10000.0, 32, RopeScaling("yarn", factor=4.0, original_context=64))},
    "partial rotary": {"rope": RopeSpec(10000.0, 16)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("codec", ["f32", "f16"])
def test_float_weights_give_the_definition(variant: str, codec: str) -> None:
    shape = Shape(16, 2, 2, 32, key_bias=variant == "bias")
    spec = spec_of(shape, **VARIANTS[variant])
    weights, dense = weights_of(spec, "F32")
    block = Block(spec, shape, weights, [(codec, codec)])
    hidden = np.random.default_rng(1).standard_normal((1, 150, D_MODEL)).astype(np.float32)
    seq = block.sequence(hidden)
    for n in (70, 1, 79):
        block.step((seq, n))
    # A key that rounds to the other of two float16 neighbours moves a score by 2^-11 of one product.
    tolerance = 1e-5 if codec == "f32" else 1e-4
    want = expected(block.world, spec, weights, dense, seq)
    assert np.abs(seq.outputs()[0] - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_1"])
def test_quantized_weights_come_near(dtype: str) -> None:
    """8-bit activations and an int8 cache: near the definition with the same dequantized weights."""
    shape = Shape(32, 2, 3, 32)
    spec = spec_of(shape)
    weights, dense = weights_of(spec, dtype)
    block = Block(spec, shape, weights, [("int8", "int8")])
    seq = block.sequence(np.random.default_rng(2).standard_normal((1, 120, D_MODEL)).astype(np.float32))
    block.step((seq, 120))
    want = expected(block.world, spec, weights, dense, seq)
    error = seq.outputs()[0] - want
    assert np.sqrt(np.mean(error**2)) <= 0.01 * np.sqrt(np.mean(want**2))


@pytest.mark.parametrize("dtype", ["F32", "Q8_0", "Q4_1"])
def test_chunks_batches_and_threads_do_not_change_a_bit(dtype: str) -> None:
    shape = Shape(16, 2, 3, 32, n_layers=2, key_bias=True)
    spec = spec_of(shape, qkv_bias=True, qk_norm=True)
    weights, _ = weights_of(spec, dtype)
    codecs = [("int8", "int8"), ("int4", "int4"), ("f16", "int4")]
    rng = np.random.default_rng(3)
    hidden = [rng.standard_normal((2, n, D_MODEL)).astype(np.float32) for n in (170, 40, 33)]

    def run(threads: int, chunks: list[int], mates: bool) -> F32:
        block = Block(spec, shape, weights, codecs, threads)
        first, *others = (block.sequence(h, lambda page: page % 3) for h in hidden)
        for i, n in enumerate(chunks):
            work = [(first, n)]
            if mates and i < 2:
                work = [(others[0], 20), (first, n), (others[1], 13 if i else 20)]
            block.step(*work)
        return first.outputs()

    base = run(1, [170], False)
    for threads, chunks, mates in (
        (2, [1] * 170, False),
        (1, [100, 70], True),
        (3, [15, 1, 1, 50, 103], True),
    ):
        assert np.array_equal(run(threads, chunks, mates).view(np.uint32), base.view(np.uint32))


def test_rotary_table_grows_without_changing_a_bit() -> None:
    """A position past the first table; the row's result equals that of a table made large at once."""
    shape = Shape(128, 1, 1, 16)
    spec = spec_of(shape)
    weights, _ = weights_of(spec, "F32")
    hidden = np.random.default_rng(4).standard_normal((1, 4200, D_MODEL)).astype(np.float32)
    outs = []
    for chunks in ([4000, 200], [4200]):
        block = Block(spec, shape, weights, [("int8", "int8")])
        seq = block.sequence(hidden)
        for n in chunks:
            block.step((seq, n))
        outs.append(seq.outputs())
    assert np.array_equal(outs[0].view(np.uint32), outs[1].view(np.uint32))


def test_a_page_that_cannot_be_sealed_raises() -> None:
    shape = Shape(16, 1, 1, 32)
    spec = spec_of(shape, qkv_bias=True)
    weights, _ = weights_of(spec, "F32")
    assert weights.v_bias is not None
    weights = replace(weights, v_bias=weights.v_bias * np.float32(1e8))
    block = Block(spec, shape, weights, [("int8", "int8")])
    seq = block.sequence(np.zeros((1, 16, D_MODEL), np.float32))
    with pytest.raises(CodecRangeError, match=r"int8 .*value of head 0: a minimum .*layer 0, tokens 0 to 15"):
        block.step((seq, 16))


def test_shapes_that_do_not_fit_are_refused() -> None:
    shape = Shape(16, 2, 2, 32)
    spec = spec_of(shape)
    weights, _ = weights_of(spec, "F32")
    context = _cpu.Context(1)
    wrong = replace(weights, k=replace(weights.k, rows=32, data=weights.k.data[: weights.k.data.size // 2]))
    with pytest.raises(LoadError, match="tensor k is 32 x 96"):
        CpuAttention(context).prepare(spec, 0, wrong, 16)
    with pytest.raises(LoadError, match="q_norm"):
        CpuAttention(context).prepare(spec, 0, replace(weights, q_norm=np.ones(16, np.float32)), 16)
    with pytest.raises(UnsupportedError, match="bias on 1"):
        CpuAttention(context).prepare(spec, 0, replace(weights, q_bias=np.ones(128, np.float32)), 16)
    with pytest.raises(UnsupportedError, match="multiple of 8 up to 1016, got 36"):
        CpuAttention(context).prepare(replace(spec, head_dim=36), 0, weights, 16)
    with pytest.raises(UnsupportedError, match="do not divide"):
        CpuAttention(context).prepare(replace(spec, n_heads=3), 0, weights, 16)
    ops = CpuAttention(context)
    ops.prepare(spec, 0, weights, 16)
    with pytest.raises(ValueError, match="one model"):
        ops.prepare(spec, 0, weights, 32)


def test_refused_sharing_is_counted() -> None:
    """Tiles that would have shared pages, over all steps."""
    shape = Shape(16, 1, 1, 32)
    spec = spec_of(shape)
    weights, _ = weights_of(spec, "F32")
    counts = []
    for partial_bytes in (64 << 20, 0):
        block = Block(spec, shape, weights, [("int8", "int8")])
        block.ops._groups[0].step = _cpu.Step(block.ops._groups[0].cache, partial_bytes)
        hidden = np.random.default_rng(0).standard_normal((1, 300, D_MODEL)).astype(np.float32)
        trunk = block.sequence(hidden)
        block.step((trunk, 256))
        before = block.ops.cascade_refused
        mates = [block.sequence(hidden) for _ in range(3)]
        for seq in mates:
            seq.position, seq.pages = 256, trunk.pages[:]
        for _ in range(2):
            block.step(*[(seq, 1) for seq in mates])
        counts.append(block.ops.cascade_refused - before)
    assert counts == [0, 2 * 3]
