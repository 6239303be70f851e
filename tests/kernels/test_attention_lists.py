"""Attention over lists of entries: pages missing, ragged pages, lists of each head's own."""

from __future__ import annotations

import numpy as np
import octavo.ops._cpu as _cpu
import pytest

from octavo.codecs.base import Role
from octavo.errors import CodecRangeError

from .paged_world import F32, SPLIT_PAGES, Entry, Seq, Shape, World, reference

ISAS = [isa for isa in ("portable", "avx2", "avx512") if _cpu.have_isa(isa)]
FORMATS = {
    "f32": [("f32", "f32")],
    "f16": [("f16", "f16")],
    "bf16": [("bf16", "bf16")],
    "int8": [("int8", "int8")],
    "int4": [("int4", "int4")],
    "keys int8, values f16": [("int8", "f16")],
    "keys f32, values int4": [("f32", "int4")],
    "mixed": [("f16", "int8"), ("int4", "bf16"), ("int8", "int4"), ("int4", "int8"), ("f32", "f32")],
}


def same_bits(a: F32, b: F32) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def pruned(world: World, n_before: int, n_after: int, *, per_head: bool, seed: int = 0, most: int | None = None) -> Seq:
    """A sequence that has run n_before tokens and been pruned."""
    seq = world.sequence(n_before + n_after, lambda page: page % len(world.formats), seed=seed)
    world.run(seq, [n_before])
    world.prune(seq, per_head=per_head, seed=seed, most=most)
    return seq


def check(world: World, seq: Seq, first: int, *, tolerance: float | None = None) -> None:
    """Outputs from position `first` on near the definition."""
    out = seq.outputs()
    affine = any(placed.codec.name in ("int8", "int4") for fmt in world.formats for placed in fmt.all_planes())
    tolerance = tolerance or (2e-4 if affine else 2e-6)
    for layer in range(world.shape.n_layers):
        expected, _, _ = reference(world, seq, layer, out.shape[1])
        assert np.isfinite(out[layer]).all()
        error, peak = out[layer, first:] - expected[first:], np.abs(expected[first:]).max()
        assert np.abs(error).max() <= tolerance * peak
        assert np.sqrt(np.square(error).mean()) <= tolerance / 8 * peak


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("per_head", [False, True])
def test_each_codec(isa: str, formats: str, per_head: bool) -> None:
    """Decoding and chunks behind a prefix of which little is left, in two layers."""
    world = World(Shape(n_layers=2, n_kv_heads=2), FORMATS[formats], isa=isa, pages=220)
    seq = pruned(world, 620, 140, per_head=per_head, most=9)
    world.run(seq, [1, 1, 70, 1, 67])
    check(world, seq, 620)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128])
def test_shapes(page_size: int, head_dim: int) -> None:
    for n_kv_heads, group, per_head in ((1, 1, True), (3, 3, False), (2, 7, True), (1, 16, False)):
        shape = Shape(page_size, n_kv_heads, group, head_dim)
        world = World(shape, FORMATS["mixed"], pages=120, seed=group)
        before = 5 * page_size + 3
        seq = pruned(world, before, page_size + 10, per_head=per_head, seed=head_dim)
        world.run(seq, [page_size + 8, 1, 1])
        check(world, seq, before, tolerance=3e-4)


@pytest.mark.parametrize("per_head", [False, True])
def test_bits_do_not_depend_on_chunks_threads_or_mates(per_head: bool) -> None:
    shape = Shape(16, 2, 3, 64, n_layers=2)

    def run(threads: int, chunks: list[int], with_mates: bool) -> F32:
        world = World(shape, FORMATS["mixed"], threads=threads, pages=300)
        seq = pruned(world, 430, 75, per_head=per_head, most=5)
        plain = world.sequence(300, lambda page: page % 5, seed=1)
        other = pruned(world, 200, 80, per_head=not per_head, seed=2)
        world.run(plain, [90])
        n = len(seq.out)
        for i, chunk in enumerate(chunks):
            mates = [(plain, 30), (seq, chunk), (other, 7)] if with_mates and i < 5 else [(seq, chunk)]
            world.step(*mates)
        world.check_gaps()
        return np.concatenate(seq.out[n:], axis=1)

    base = run(1, [75], False)
    for threads, chunks, with_mates in (
        (1, [1] * 75, False),
        (2, [1] * 75, True),
        (3, [40, 1, 34], True),
        (2, [20, 16, 16, 16, 7], False),
    ):
        assert same_bits(run(threads, chunks, with_mates), base)


def test_mates_with_lists_do_not_change_a_plain_sequence() -> None:
    results = []
    for with_mates in (False, True):
        world = World(Shape(16, 2, 3, 64), FORMATS["mixed"], threads=2, pages=300)
        plain = world.sequence(200, lambda page: page % 5, seed=1)
        world.run(plain, [170])
        mates = [pruned(world, 150, 40, per_head=kind, seed=3) for kind in (False, True)]
        for _ in range(30):
            world.step((plain, 1), *([(mate, 1) for mate in mates] if with_mates else []))
        results.append(plain.outputs())
    assert same_bits(*results)


@pytest.mark.parametrize("per_head", [False, True])
def test_all_lists_that_name_every_page_are_one(per_head: bool) -> None:
    """A list for each head with all pages gives the bits of one list, so splits are the same."""
    results = []
    for threads in (1, 2):
        world = World(Shape(16, 3, 2, 40, n_layers=2), FORMATS["mixed"], threads=threads, pages=128)
        seq = world.sequence(500, lambda page: page % 5)
        world.run(seq, [450])
        if per_head and threads == 2:
            entries = [Entry(o, seq.format_of(i), i * 16, 16) for i, o in enumerate(seq.pages)]
            seq.lists = [list(entries) for _ in range(6)]
        results.append(world.run(seq, [1] * 20 + [30]))
    assert same_bits(*results)


def test_splits_follow_positions() -> None:
    """Pages may be missing anywhere; entries of few tokens, more in a span than a split takes, make more splits."""
    world = World(Shape(16, 1, 2, 64), [("int8", "int8")], pages=256)
    seq = world.sequence(16 * 40)
    world.run(seq, [16 * 33])
    all_pages = [Entry(o, 0, i * 16, 16) for i, o in enumerate(seq.pages)]

    def reads(entries: list[Entry]) -> int:
        seq.lists = [entries]
        arrays = world.arrays([(seq, 1)])
        return int(world.build(arrays).page_reads)

    assert reads(all_pages) == 33
    assert reads(all_pages[:3] + all_pages[20:]) == 16
    assert reads([]) == 0
    # More entries in a span than a split has: one token each.
    rng = np.random.default_rng(0)
    world.prune(seq, per_head=False, seed=5, most=1)
    assert seq.lists is not None
    assert max(np.bincount([e.position // 128 for e in seq.lists[0]])) > SPLIT_PAGES
    first = seq.position
    world.run(seq, [int(n) for n in rng.integers(1, 20, 5)])
    check(world, seq, first)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("threads", [1, 2])
def test_ragged_pages_that_sequences_share_are_read_once(group: int, threads: int) -> None:
    world = World(Shape(16, 2, group, 40), FORMATS["mixed"], threads=threads, pages=200)
    trunk = pruned(world, 30 * 16, 40, per_head=False)
    assert trunk.lists is not None
    mates = [world.fork(trunk, 30, 40, seed=i + 1) for i in range(6)]
    for i, seq in enumerate(mates):
        seq.pruned, seq.lists = trunk.pruned, [list(trunk.lists[0])]
        if i == 4:  # one that reads less of a page, one that has it elsewhere in its positions
            e = next(e for e in seq.lists[0] if e.n_tokens > 1)
            seq.lists[0][seq.lists[0].index(e)] = Entry(e.offset, e.format, e.position, e.n_tokens - 1)
        if i == 5:
            e = seq.lists[0][1]
            assert e.position > seq.lists[0][0].position + seq.lists[0][0].n_tokens
            seq.lists[0][1] = Entry(e.offset, e.format, e.position - 1, e.n_tokens)
    alone = []
    for seq in mates:
        world.step((seq, 1))
        alone.append(seq.out.pop())
        seq.position -= 1
    world.step(*[(seq, 1) for seq in mates])
    for seq, expected in zip(mates, alone, strict=True):
        assert same_bits(seq.out[-1], expected)
    for seq in mates:
        seq.position -= 1
    each = [world.build(world.arrays([(seq, 1)])).page_reads for seq in mates]
    four = world.build(world.arrays([(seq, 1) for seq in mates[:4]])).page_reads
    assert four < sum(each[:4]) / 2
    assert world.build(world.arrays([(seq, 1) for seq in mates])).page_reads >= four + 2 * SPLIT_PAGES


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_damaged_scale_counts_only_where_there_is_a_token(codec: str, per_head: bool) -> None:
    world = World(Shape(n_kv_heads=2), [(codec, codec)], pages=200)
    seq = pruned(world, 400, 40, per_head=per_head)
    assert seq.lists is not None
    world.run(seq, [1])
    ragged = next(e for e in seq.lists[-1] if e.n_tokens < world.shape.page_size)
    placed = world.formats[0].planes[Role.VALUE][0]
    last_head = placed.codec.head_bytes(placed.plane)[-1]
    n_codes = placed.plane.head(0).n_values // (2 if codec == "int4" else 1)
    scales = ragged.offset + placed.offset + last_head[n_codes:]
    for slot, bad in ((ragged.n_tokens, False), (ragged.n_tokens - 1, True)):
        world.memory[scales[2 * slot : 2 * slot + 2]] = 0
        if not bad:
            world.run(seq, [1])
            continue
        page = ragged.position // world.shape.page_size
        with pytest.raises(CodecRangeError, match=rf"{codec} .*value of head 1: a stored scale.*layer 0, page {page} "):
            world.run(seq, [1])


def test_per_head_lists_are_checked_one_by_one() -> None:
    world = World(Shape(n_layers=2), [("int8", "int8")], pages=200)
    seq = pruned(world, 200, 40, per_head=True)
    assert seq.lists is not None
    seq.position = 200
    last = seq.lists[4][-1]
    seq.lists[4][-1] = Entry(last.offset, last.format, 192, 9)
    with pytest.raises(
        ValueError, match=rf"segment 0, list 4, entry {len(seq.lists[4]) - 1} has 9 tokens from position 192 on"
    ):
        world.build(world.arrays([(seq, 40)]))
    del seq.lists[4:]
    with pytest.raises(ValueError, match="segment 0: has 4 lists of entries; there must be 1, or 6"):
        world.build(world.arrays([(seq, 40)]))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_sharing_gives_way_tile_by_tile(group: int, threads: int) -> None:
    """With less room for partial results fewer sequences share, those that gain most the last to give way; no bit
    changes."""
    shape, n_mates = Shape(16, 2, group, 40), 12

    def run(partial_bytes: int) -> tuple[F32, int, int]:
        world = World(shape, FORMATS["mixed"], threads=threads, pages=200, partial_bytes=partial_bytes)
        trunk = world.sequence(29 * 16, lambda page: page % 5)
        world.run(trunk, [29 * 16])
        depths = [29, 24, 17, 9]
        mates = [world.fork(trunk, depths[i % 4], 20, seed=i + 1) for i in range(n_mates)]
        for seq in mates:
            world.step((seq, 3))
        step = world.build(world.arrays([(seq, 1) for seq in mates]))
        world.step(*[(seq, 1) for seq in mates])
        return np.concatenate([seq.out[-1] for seq in mates], axis=1), step.page_reads, step.cascade_refused

    # A tile's partial results: 4 splits of the deepest, each of the head dimension and two floats a query head.
    tile = 4 * 2 * group * (40 + 2) * 4
    runs = [run(n) for n in (64 << 20, 12 * tile, 6 * tile, 3 * tile, tile, 0)]
    for out, _, _ in runs[1:]:
        assert same_bits(out, runs[0][0])
    reads, refused = [r for _, r, _ in runs], [n for _, _, n in runs]
    assert reads == sorted(reads)
    assert reads[1] == reads[0] < reads[2] < reads[-1] == 3 * (29 + 24 + 17 + 9)
    assert refused == sorted(refused)
    assert refused[:2] == [0, 0]
    assert 0 < refused[2] < refused[3] < refused[4] == refused[5] == n_mates
    # Three tiles of the deepest fit, and gain most.
    assert reads[3] == reads[-1] - 2 * 3 * SPLIT_PAGES
