"""What every backend's attention block keeps: lists of entries, cache groups, and open pages after a failed step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from octavo.cache.format import Form, PageFormat, build_format
from octavo.cache.spec import CacheSpec, FullGroup
from octavo.errors import CodecRangeError
from octavo.models.spec import ModelSpec
from octavo.ops.base import Batch, GroupEntries, Ops
from octavo.ops.cpu import CpuOps
from octavo.ops.host_store import HostStore
from octavo.ops.reference import ReferenceOps

from .paged_world import F32, U8, Seq, Shape, World
from .test_attention_block_cpu import D_MODEL, expected, spec_of, weights_of

BACKENDS: dict[str, Callable[[], Ops]] = {"cpu": lambda: CpuOps(threads=2), "reference": ReferenceOps}
SHAPE = Shape(16, 2, 2, 32, n_layers=3)


class TwoGroups(ModelSpec):
    """The outer layers in one cache group, the others in another."""

    def cache_spec(self) -> CacheSpec:
        heads = self.n_kv_heads, self.head_dim
        inner = tuple(range(1, self.n_layers - 1))
        return CacheSpec(
            (FullGroup((0, self.n_layers - 1), *heads, name="outer"), FullGroup(inner, *heads, name="inner"))
        )


class Model:
    """The attention blocks of one model over one arena; a World for the pages of each cache group."""

    def __init__(self, ops: Ops, spec: ModelSpec, codecs: Sequence[tuple[str, str]], seed: int = 0) -> None:
        self.ops, self.spec = ops, spec
        groups = spec.cache_spec().groups
        shapes = [Shape(16, spec.n_kv_heads, 2, spec.head_dim, len(group.layers)) for group in groups]
        self.worlds = [World(shape, codecs, pages=200, seed=i) for i, shape in enumerate(shapes)]
        sizes = [0, *np.cumsum([world.memory.size for world in self.worlds])]
        self.store = HostStore(int(sizes[-1]))
        self.memory: U8 = self.store.memory
        self.memory[:] = 0xFF
        self.shifts = sizes[:-1]
        for world, start in zip(self.worlds, self.shifts, strict=True):
            world.memory = self.memory[start : start + world.memory.size]
        for i, group in enumerate(groups):
            for j, (key, value) in enumerate(codecs):
                assert ops.add_format(i, build_format(group, 16, Form(key, value))) == j
        self.weights, self.dense = weights_of(spec, "F32", seed)
        self.blocks = [ops.prepare_attention(spec, i, self.weights, 16) for i in range(spec.n_layers)]

    def sequence(self, hidden: F32, format_of: Callable[[int], int] = lambda page: 0) -> list[Seq]:
        """hidden [n_layers, n, d_model] -> its pages in every group."""
        result = []
        for world, group in zip(self.worlds, self.spec.cache_spec().groups, strict=True):
            result.append(Seq(hidden[list(group.layers)], format_of, open_offset=world.alloc(world.open_format)))
        return result

    def step(self, hidden: F32, *work: tuple[list[Seq], int]) -> F32:
        """hidden [n_layers, n, d_model], rows of all sequences -> what the blocks make of it."""
        batch: Batch | None = None
        groups: list[Any] = []
        for i, (world, shift) in enumerate(zip(self.worlds, self.shifts, strict=True)):
            batch = world.batch([(seqs[i], n) for seqs, n in work])
            (group,) = batch.groups
            group.page_offset[:] += shift
            group.open_offset[group.open_offset >= 0] += shift
            groups.append(group)
        assert batch is not None
        batch = Batch(self.store, batch.tokens, batch.row_start, batch.position, tuple(groups))
        out = hidden.copy()
        for block, rows in zip(self.blocks, out, strict=True):
            self.ops.attention_block(block, rows, batch)
        for seqs, n in work:
            for seq in seqs:
                seq.position += n
        return out

    def run(self, hidden: F32, seqs: list[Seq], chunks: Sequence[int]) -> F32:
        """The next tokens of one sequence, [n_layers, sum of chunks, d_model]."""
        outs = []
        for n in chunks:
            position = seqs[0].position
            outs.append(self.step(hidden[:, position : position + n], (seqs, n)))
        return np.concatenate(outs, axis=1)

    def open_tokens(self, seqs: list[Seq], n: int) -> list[F32]:
        """The first n tokens of a sequence's open pages, bit by bit: every group, layer and role."""
        result = []
        for world, seq in zip(self.worlds, seqs, strict=True):
            fmt: PageFormat = world.open_format
            for placed in fmt.all_planes():
                start = seq.open_offset + placed.offset
                result.append(placed.codec.decode(world.memory[start : start + placed.n_bytes], placed.plane, n))
        return result


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]()


def random_hidden(n_layers: int, n: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((n_layers, n, D_MODEL)).astype(np.float32)


def same_bits(a: Sequence[F32], b: Sequence[F32]) -> bool:
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("codecs", [("f32", "f32"), ("f16", "bf16"), ("int8", "int4"), ("int4", "int8")], ids="+".join)
@pytest.mark.parametrize("per_head", [False, True])
def test_pruned_sequences_read_what_is_left(ops: Ops, codecs: tuple[str, str], per_head: bool) -> None:
    """Against the definition in float64, with a mask, beside a plain sequence."""
    shape = Shape(16, 2, 2, 32)
    model = Model(ops, spec_of(shape), [codecs])
    (world,) = model.worlds
    # Another rounding of a key than the definition's shows where pages are sealed anew: those codecs end before one is.
    exact = codecs == ("f32", "f32")
    after = 40 if exact else 8
    hidden, other = random_hidden(1, 325 + after), random_hidden(1, 60, seed=1)
    (seq,), (plain,) = seqs, mates = model.sequence(hidden), model.sequence(other)
    model.run(hidden, seqs, [325])
    model.run(other, mates, [50])
    world.prune(seq, per_head=per_head, seed=3, most=7)
    out = np.concatenate(
        [model.step(np.concatenate((hidden[:, 325:328], other[:, 50:55]), axis=1), (seqs, 3), (mates, 5))[:, :3],
         model.run(hidden, seqs, [1, after - 4])], axis=1)  # fmt: skip
    want = expected(world, model.spec, model.weights, model.dense, seq)[325:]
    error = np.abs(out[0] - want)
    # Rotary angles and queries of the definition are float64; affine pages read queries in 16 bits.
    assert error.max() <= (1e-5 if codecs[0] not in ("int8", "int4") else 2e-4) * np.abs(want).max()
    assert plain.position == 55


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("start", [7, 327])
def test_a_failed_step_leaves_open_pages_as_they_were(ops: Ops, per_head: bool, start: int) -> None:
    """The last layer cannot seal a page of a segment that starts within one and spans three, when the layers before it
    have long written their last page over its first. Neither it nor a batch mate is the worse for it."""
    model = Model(ops, spec_of(SHAPE), [("int8", "int4")])
    hidden, other = random_hidden(3, start + 40), random_hidden(3, 100, seed=1)
    seqs, mates = model.sequence(hidden), model.sequence(other)
    model.run(hidden, seqs, [start])
    model.run(other, mates, [51])
    if per_head:
        model.worlds[0].prune(seqs[0], per_head=True, seed=1)
    before = model.open_tokens(seqs, start % 16), model.open_tokens(mates, 51 % 16)
    position = seqs[0].position
    bad = hidden.copy()
    bad[-1, start + 20] = np.inf
    rows = np.concatenate((other[:, 51:91], bad[:, start : start + 40]), axis=1)
    for _ in range(2):
        with pytest.raises(CodecRangeError, match=rf"(layer 2, token {start + 20})|NaN"):
            model.step(rows, (mates, 40), (seqs, 40))
        assert same_bits(model.open_tokens(seqs, start % 16), before[0])
        assert same_bits(model.open_tokens(mates, 51 % 16), before[1])
    assert seqs[0].position == position
    # Run again, both give what they would have given.
    clean = Model(type(ops)(), spec_of(SHAPE), [("int8", "int4")])
    clean_seqs = clean.sequence(hidden)
    clean.run(hidden, clean_seqs, [start])
    if per_head:
        clean.worlds[0].prune(clean_seqs[0], per_head=True, seed=1)
    want = clean.run(hidden, clean_seqs, [40])
    got = model.step(np.concatenate((other[:, 51:91], hidden[:, start : start + 40]), axis=1), (mates, 40), (seqs, 40))
    assert same_bits([got[:, 40:]], [want])


def two_groups(spec: ModelSpec) -> TwoGroups:
    return TwoGroups(**{name: getattr(spec, name) for name in ModelSpec.__dataclass_fields__})


def test_layers_may_be_of_two_cache_groups(ops: Ops) -> None:
    """The same bits as in one group, and each group's pages are its own."""
    spec = spec_of(Shape(16, 2, 2, 32, n_layers=4))
    codecs = [("int8", "int8"), ("f16", "int4")]
    hidden = random_hidden(4, 150)
    outs = []
    for each in (spec, two_groups(spec)):
        model = Model(ops if each is spec else type(ops)(), each, codecs)
        seqs = model.sequence(hidden, lambda page: page % 2)
        outs.append(model.run(hidden, seqs, [70, 1, 60, 19]))
        for world in model.worlds:
            world.check_gaps()
    assert len(model.worlds) == 2
    assert same_bits([outs[0]], [outs[1]])


@pytest.mark.parametrize("failing", [2, 3])
def test_a_failed_step_leaves_open_pages_of_all_groups(ops: Ops, failing: int) -> None:
    model = Model(ops, two_groups(spec_of(Shape(16, 2, 2, 32, n_layers=4))), [("int8", "int8")])
    hidden = random_hidden(4, 60)
    seqs = model.sequence(hidden)
    model.run(hidden, seqs, [9])
    before = model.open_tokens(seqs, 9)
    bad = hidden.copy()
    bad[failing, 30] = np.nan
    with pytest.raises(CodecRangeError, match="NaN"):
        model.run(bad, seqs, [40])
    assert same_bits(model.open_tokens(seqs, 9), before)


def test_errors_name_the_model_s_layer() -> None:
    model = Model(CpuOps(threads=1), two_groups(spec_of(Shape(16, 2, 2, 32, n_layers=4))), [("int8", "int8")])
    for layer in (2, 3):
        hidden = random_hidden(4, 20)
        hidden[layer, 5] = np.nan
        with pytest.raises(CodecRangeError, match=f"layer {layer}, token 5"):
            model.run(hidden, model.sequence(hidden), [20])


def _negative_offset(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["page_offset"][0] = -64


def _past_the_arena(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["page_offset"][0] = 1 << 40


def _entries_that_overlap(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["position"][1] = 8


def _no_tokens(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["n_tokens"][0] = 0


def _past_its_own_page(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["position"][1] = 24


def _unknown_format(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["page_format"][0] = 9


def _no_open_page(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["open_offset"][0] = -64


def _open_page_where_none_is_needed(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["open_offset"][1] = -999


def _a_page_sealed_twice(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["page_offset"][-1] = group["page_offset"][2]


def _an_open_page_shared(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["open_offset"][1] = group["open_offset"][0]


def _an_open_page_that_is_sealed(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["open_offset"][0] = group["page_offset"][2]


def _a_page_read_and_sealed(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["page_offset"][0] = group["page_offset"][-1]


def _half_a_page_on_another(rows: dict[str, Any], group: dict[str, Any]) -> None:
    group["page_offset"][-1] = group["page_offset"][2] + 64


@pytest.mark.parametrize(
    "fault",
    [
        _negative_offset, _past_the_arena, _entries_that_overlap, _no_tokens, _past_its_own_page, _unknown_format,
        _no_open_page, _open_page_where_none_is_needed, _a_page_sealed_twice, _an_open_page_shared,
        _an_open_page_that_is_sealed, _a_page_read_and_sealed, _half_a_page_on_another,
    ],
)  # fmt: skip
def test_a_batch_that_breaks_a_rule_is_refused(
    ops: Ops, fault: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    """Two sequences of two pages; one goes on by 20 tokens, the other, from a page's edge, by a page."""
    model = Model(ops, spec_of(Shape(16, 2, 2, 32)), [("int8", "int8")])
    (world,) = model.worlds
    hidden = random_hidden(1, 60)
    first, second = model.sequence(hidden), model.sequence(hidden)
    model.run(hidden, first, [32])
    model.run(hidden, second, [32])
    batch = world.batch([(first[0], 20), (second[0], 16)])
    (entries,) = batch.groups
    rows = {name: getattr(batch, name).copy() for name in ("tokens", "row_start", "position")}
    group = {f.name: getattr(entries, f.name).copy() for f in fields(entries)}
    before = model.memory.copy()
    fault(rows, group)
    with pytest.raises(ValueError, match=r"segment|page at byte"):
        ops.attention_block(
            model.blocks[0], random_hidden(1, 36)[0], Batch(model.store, **rows, groups=(GroupEntries(**group),))
        )
    assert np.array_equal(model.memory, before), "and nothing was written"


def test_a_batch_of_absurd_size_is_refused_before_it_is_believed(ops: Ops) -> None:
    model = Model(ops, spec_of(Shape(16, 2, 2, 32)), [("int8", "int8")])
    hidden = random_hidden(1, 40)
    batch = model.worlds[0].batch([(model.sequence(hidden)[0], 20)])
    absurd = replace(batch, row_start=np.array([0, 2**31 - 1], dtype=np.int32))
    with pytest.raises(ValueError, match=r"segment 0|hidden|rows"):
        ops.attention_block(model.blocks[0], random_hidden(1, 20)[0], absurd)
