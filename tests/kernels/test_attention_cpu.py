"""The C++ attention over pages: right, bit-identical however it is run, and confined to its pages."""

from __future__ import annotations

import numpy as np
import octavo.ops._cpu as _cpu
import pytest

from octavo.codecs.base import Role
from octavo.errors import CodecRangeError
from octavo.models.rope import rope_tables
from octavo.models.spec import RopeSpec

from .paged_world import F32, SPLIT_PAGES, Seq, Shape, World, reference

ISAS = [isa for isa in ("portable", "avx2", "avx512") if _cpu.have_isa(isa)]
EACH_FORMAT = [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int4")]
MIXED = [
    ("f16", "f16"),
    ("int4", "int4"),
    ("int8", "int8"),
    ("int8", "int4"),
    ("int4", "f32"),
    ("bf16", "int8"),
]


def same_bits(a: F32, b: F32) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def check(world: World, seq: Seq, *, tolerance: float | None = None) -> None:
    """Outputs near the definition, and (without rotary embedding, where exact keys are known) sealed bytes
    equal to it. Over affine pages queries and weights are rounded to 16 bits."""
    out = seq.outputs()
    affine = any(placed.codec.name in ("int8", "int4") for fmt in world.formats for placed in fmt.all_planes())
    tolerance = tolerance or (2e-4 if affine else 2e-6)
    for layer in range(world.shape.n_layers):
        expected, keys, values = reference(world, seq, layer, out.shape[1])
        assert np.isfinite(out[layer]).all()
        error, peak = out[layer] - expected, np.abs(expected).max()
        assert np.abs(error).max() <= tolerance * peak
        assert np.sqrt(np.square(error).mean()) <= tolerance / 8 * peak
        for page in range(out.shape[1] // world.shape.page_size):
            span = slice(page * world.shape.page_size, (page + 1) * world.shape.page_size)
            fmt = world.formats[seq.format_of(page)]
            for placed, exact in ((fmt.planes[Role.KEY][layer], keys), (fmt.planes[Role.VALUE][layer], values)):
                if (world.sin != 0).any() and placed.plane.role is Role.KEY:
                    continue
                begin = seq.pages[page] + placed.offset
                stored = world.memory[begin : begin + placed.n_bytes]
                assert np.array_equal(stored, placed.codec.encode(np.ascontiguousarray(exact[span]), placed.plane))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codecs", EACH_FORMAT, ids=lambda c: c[0])
@pytest.mark.parametrize("key_bias", [False, True])
def test_each_codec(isa: str, codecs: tuple[str, str], key_bias: bool) -> None:
    world = World(Shape(n_layers=2, key_bias=key_bias), [codecs], isa=isa)
    seq = world.sequence(330)
    world.run(seq, [100, 1, 1, 100, 64, 64])
    check(world, seq)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 64, 80, 96, 128, 256])
def test_shapes(page_size: int, head_dim: int) -> None:
    for n_kv_heads, group in ((1, 1), (3, 3), (2, 7), (1, 16)):
        shape = Shape(page_size, n_kv_heads, group, head_dim)
        world = World(shape, MIXED, pages=16, seed=group)
        seq = world.sequence(3 * page_size + 5, lambda page: (page * 2 + 1) % len(MIXED), seed=head_dim)
        world.run(seq, [page_size - 1, 1, page_size + 3, page_size - 1, 1, 1, 1])
        check(world, seq, tolerance=3e-4)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 300])
def test_page_edges(length: int) -> None:
    """From an empty prefix to every kind of edge, the next tokens one by one over it."""
    world = World(Shape(n_kv_heads=1, group=2), [("int8", "int4")])
    seq = world.sequence(length + 3)
    world.run(seq, [length, 1, 1, 1])
    check(world, seq)


def test_mixed_formats_in_one_split() -> None:
    world = World(Shape(n_kv_heads=2, group=2), MIXED)
    seq = world.sequence(700, lambda page: page % len(MIXED))
    world.run(seq, [300, 1, 399])
    check(world, seq)


@pytest.mark.parametrize("codecs", [*EACH_FORMAT, ("int8", "int4")], ids="+".join)
@pytest.mark.parametrize("page_size", [16, 64])
def test_chunks_do_not_change_a_bit(codecs: tuple[str, str], page_size: int) -> None:
    n = 9 * page_size + 5  # into the second split
    chunkings = [[n], [1] * n, [7] * (n // 7) + [n % 7] * (n % 7 > 0), [page_size] * 9 + [5], [n - 1, 1]]
    results = []
    for chunks in chunkings:
        world = World(Shape(page_size, 2, 3, 64), [codecs], seed=len(chunks))
        seq = world.sequence(n)
        out = world.run(seq, [c for c in chunks if c])
        results.append((out, [world.sealed(seq, p) for p in range(9)]))
    for out, pages in results[1:]:
        assert same_bits(out, results[0][0])
        assert all(np.array_equal(a, b) for a, b in zip(pages, results[0][1], strict=True))


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n_mates", [2, 9, 60])
def test_pages_that_sequences_share_are_read_once(group: int, threads: int, n_mates: int) -> None:
    """Forks off a trunk at several depths, decoding together: bits as alone, shared splits read once for all."""
    shape, size = Shape(16, 2, group, 40), 16
    world = World(shape, MIXED, threads=threads, pages=64 + 4 * n_mates)
    trunk = world.sequence(29 * size, lambda page: page % len(MIXED))
    world.run(trunk, [29 * size])
    depths = [29, 24, 24, 17, 8, 7, 0]
    mates = [world.fork(trunk, depths[i % len(depths)], 40, seed=i + 1) for i in range(n_mates)]
    for seq in mates:
        world.step((seq, 1 + len(seq.pages) % 3))
    expected = []
    for seq in mates:
        position, n = seq.position, len(seq.out)
        for _ in range(2):
            world.step((seq, 1))
        expected.append(np.concatenate(seq.out[n:], axis=1))
        seq.position, seq.out = position, seq.out[:n]
    reads = [world.build(world.arrays([(seq, 1)])).page_reads for seq in mates]
    assert reads == [seq.position // size for seq in mates]

    together = world.build(world.arrays([(seq, 1) for seq in mates])).page_reads
    whole = [len(seq.pages) // SPLIT_PAGES for seq in mates]
    shared = [sum(w > split for w in whole) for split in range(3)]
    # Up to 256 query heads take a split of 8 pages of 16 together.
    if n_mates * group <= 256:
        assert together == sum(reads) - sum(SPLIT_PAGES * max(0, n - 1) for n in shared)
    if n_mates > len(depths):
        assert together < sum(reads) / 2
    for _ in range(2):
        world.step(*[(seq, 1) for seq in mates])
    world.check_gaps()
    for seq, alone in zip(mates, expected, strict=True):
        assert same_bits(np.concatenate(seq.out[-2:], axis=1), alone)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_batch_mates_do_not_change_a_bit(group: int, threads: int) -> None:
    """Alone on one thread, against in a batch on several: lengths from none to several splits, all
    formats."""
    shape = Shape(16, 2, group, 64)
    prefixes = [0, 5, 16, 130, 400, 31]
    tails = [3, 1, 16, 1, 40, 1]

    def format_of(page: int) -> int:
        return page % len(MIXED)

    alone = []
    for i, (prefix, tail) in enumerate(zip(prefixes, tails, strict=True)):
        world = World(shape, MIXED, seed=i)
        seq = world.sequence(prefix + tail, format_of, seed=i)
        alone.append(world.run(seq, [n for n in (prefix, tail) if n])[:, prefix:])
    world = World(shape, MIXED, threads=threads, pages=128)
    seqs = [world.sequence(p + t, format_of, seed=i) for i, (p, t) in enumerate(zip(prefixes, tails, strict=True))]
    world.step(*[(s, p) for s, p in zip(seqs, prefixes, strict=True) if p])
    order = [3, 0, 5, 1, 4, 2]
    world.step(*[(seqs[i], tails[i]) for i in order])
    world.check_gaps()
    for seq, expected in zip(seqs, alone, strict=True):
        assert same_bits(seq.out[-1], expected)


def test_unused_slots_are_never_read() -> None:
    """Slots past the last token hold NaN, then huge numbers, in both open pages and pages yet to be
    sealed."""
    results = []
    for fill in (0xFF, 0x7E, 0x00):
        world = World(Shape(n_kv_heads=1, group=5), [("f32", "f32")])
        seq = world.sequence(45)
        offset = seq.open_offset
        world.memory[offset : offset + world.open_format.page_bytes] = fill
        results.append(world.run(seq, [7, 1, 1, 3, 1, 20, 12]))
    assert np.isfinite(results[0]).all()
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_a_later_token_cannot_poison_an_earlier_one() -> None:
    """An infinite value in a chunk reaches the rows that may see it, and no other."""
    world = World(Shape(n_kv_heads=1, group=2), [("f16", "f16")])
    clean, poisoned = world.sequence(20, seed=1), world.sequence(20, seed=1)
    value = (world.shape.group + 1) * world.shape.head_dim
    poisoned.qkv[:, 11, value:] = np.inf
    world.step((clean, 20), (poisoned, 20))
    assert same_bits(poisoned.out[0][:, :11], clean.out[0][:, :11])
    assert not np.isfinite(poisoned.out[0][:, 11:]).any()


def test_sharp_and_flat_scores() -> None:
    """Scores far apart (all weight on one token, in any split) and all equal."""
    world = World(Shape(n_kv_heads=1, group=1, page_size=16), [("f32", "f32")])
    for at in (0, 100, 200, 299):
        seq = world.sequence(300, seed=at)
        d = world.shape.head_dim
        seq.qkv[0, :, :d] = 1.0
        seq.qkv[0, :, d : 2 * d] = 0.0
        seq.qkv[0, at, d : 2 * d] = 500.0
        out = world.run(seq, [300])
        assert np.abs(out[0, 299] - seq.qkv[0, at, 2 * d :]).max() == 0
        world.free += [*seq.pages, seq.open_offset]
    seq = world.sequence(300, seed=7)
    seq.qkv[0, :, :d] = 0.0
    out = world.run(seq, [299, 1])
    assert np.allclose(out[0, 299], seq.qkv[0, :, 2 * d :].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_extreme_codes(codec: str) -> None:
    """Every code at the end of its range. Scores reach 100, so queries' rounding shows."""
    world = World(Shape(n_kv_heads=2, group=3), [(codec, codec)])
    seq = world.sequence(200)
    keys = world.shape.group * 2 * 64
    seq.qkv[0, :, keys:] = np.sign(seq.qkv[0, :, keys:]) * 3
    world.run(seq, [199, 1])
    check(world, seq, tolerance=4e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [512, 520, 1008, 1016])
@pytest.mark.parametrize("n_rows", [1, 9])
@pytest.mark.parametrize("sign", [1, -1])
def test_integer_sums_stay_in_range(isa: str, head_dim: int, n_rows: int, sign: int) -> None:
    """Tokens with the lowest or the highest code in every channel, by queries and scales that are the same in all of
    them: the largest integers that can be. 9 rows read the codes unpacked."""
    world = World(Shape(128, 1, n_rows, head_dim, key_bias=True), [("int8", "int8")], isa=isa, pages=4)
    seq = world.sequence(129)
    seq.position, seq.pages = 128, [world.alloc(world.formats[0])]
    rng = np.random.default_rng(0)
    keys, values = np.zeros((2, 128, 1, head_dim), np.float32)
    keys[rng.random(128) < 0.5] = 255
    values[:, 0] = np.where(rng.random((128, head_dim)) < 0.5, 255, 0)
    values[:, 0, :2] = 0, 255
    for x, role in ((keys, Role.KEY), (values, Role.VALUE)):
        placed = world.formats[0].planes[role][0]
        data = placed.codec.encode(x, placed.plane)
        assert set(data[: placed.plane.n_values].view(np.int8)) == {-128, 127}
        assert (placed.codec.decode(data, placed.plane) == x).all()
        world.memory[seq.pages[0] + placed.offset :][: placed.n_bytes] = data
    query = np.float32(sign * 2e-4)
    seq.qkv[0, 128, : n_rows * head_dim] = query
    seq.qkv[0, 128, n_rows * head_dim :] = 0
    out = world.run(seq, [1])[0, 0].reshape(n_rows, head_dim)
    scores = np.append(keys[:, 0].astype(np.float64) @ np.full(head_dim, query) * world.shape.scale, 0)
    weights = np.exp(scores - scores.max())
    expected = weights @ np.append(values[:, 0], np.zeros((1, head_dim)), axis=0) / weights.sum()
    assert np.abs(out - expected).max() <= 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rope_dim", [64, 48])
def test_query_key_norm_and_rotary_embedding(isa: str, rope_dim: int) -> None:
    rng = np.random.default_rng(5)
    rope = rope_tables(RopeSpec(10000.0, rope_dim), 400)
    world = World(Shape(n_kv_heads=2, group=2), [("f32", "f32")], rope=rope, isa=isa)
    world.q_norm = rng.uniform(0.5, 1.5, 64).astype(np.float32)
    world.k_norm = rng.uniform(0.5, 1.5, 64).astype(np.float32)
    seq = world.sequence(300)
    world.run(seq, [200, 1, 99])
    check(world, seq, tolerance=5e-6)
    # Bit-equality holds with these in the path too.
    other = World(Shape(n_kv_heads=2, group=2), [("f32", "f32")], rope=rope, isa=isa, threads=2)
    other.q_norm, other.k_norm = world.q_norm, world.k_norm
    again = other.sequence(300)
    assert same_bits(other.run(again, [1] * 33 + [250, 17]), seq.outputs())


@pytest.mark.parametrize("codecs", [("f16", "f16"), ("int8", "int8"), ("int4", "int4")], ids=lambda c: c[0])
@pytest.mark.parametrize("split", [[64], [40, 24], [63, 1], [1] * 64])
def test_sealing_errors_name_layer_role_and_token(codecs: tuple[str, str], split: list[int]) -> None:
    width = Shape().width
    for role, column in (("key", width - 6 * 64 + 2 * 64 + 5), ("value", width - 64 + 5)):
        world = World(Shape(n_layers=2), [codecs])
        seq = world.sequence(64)
        seq.qkv[1, 37, column] = np.nan
        with pytest.raises(CodecRangeError, match=rf"{codecs[0]} .* {role} of head 2: .*NaN.*layer 1, token 37"):
            world.run(seq, split)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failed_step_can_be_run_again(threads: int) -> None:
    """Another sequence fails in the last layer, when the first ones have long overwritten the open page. Alone, the
    sequence then gives what it would have given."""
    shape = Shape(n_layers=3)
    codecs = [("int8", "int4")]
    clean = World(shape, codecs)
    expected = clean.run(clean.sequence(200), [20, 130, 50])
    world = World(shape, codecs, threads=threads)
    seq, other, bad = world.sequence(200), world.sequence(40, seed=1), world.sequence(40, seed=2)
    world.step((seq, 20), (other, 5))
    bad.qkv[2, 17, -1] = np.inf
    for _ in range(2):
        with pytest.raises(CodecRangeError, match="layer 2, token 17"):
            world.step((other, 35), (seq, 130), (bad, 40))
    world.step((seq, 130))
    world.step((other, 35), (seq, 50))
    assert same_bits(seq.outputs(), expected)
    alone = clean.sequence(40, seed=1)
    assert same_bits(other.outputs(), clean.run(alone, [5, 35]))


def test_scale_overflow_names_the_page() -> None:
    world = World(Shape(), [("int8", "int8")])
    seq = world.sequence(96)
    seq.qkv[0, 40, -1] = 1e8
    with pytest.raises(CodecRangeError, match=r"int8 .*value of head 2: a scale.*layer 0, tokens 32 to 63"):
        world.run(seq, [96])


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_damaged_scale_is_an_error(codec: str, role: str, threads: int) -> None:
    world = World(Shape(), [(codec, codec)], threads=threads)
    seq = world.sequence(400)
    world.run(seq, [399])
    placed = world.formats[0].planes[Role(role)][0]
    n_codes = placed.plane.n_values // (2 if codec == "int4" else 1)
    scales = world.memory[seq.pages[9] + placed.offset + n_codes :][:8].view(np.float16)
    scales[2] = 0
    with pytest.raises(CodecRangeError, match=rf"{codec} .*{role} of head 0: a stored scale.*layer 0, page 9"):
        world.run(seq, [1])


def test_scratch_does_not_grow_once_warm() -> None:
    world = World(Shape(), [("int8", "int8")], threads=2)
    seq = world.sequence(300)
    world.run(seq, [256, 1])
    held = world.context.scratch_bytes
    world.run(seq, [1] * 40)
    assert world.context.scratch_bytes == held


ENTRY_ARRAYS = ("page_offset", "page_format", "entry_position", "n_tokens")
BAD_BATCHES = {
    "format": (lambda b: b["page_format"].__setitem__(0, 9), "segment 0, list 0, entry 0 has page_format 9"),
    "page past the end": (lambda b: b["page_offset"].__setitem__(1, 1 << 40), "entry 1 has page_offset"),
    "page before the start": (lambda b: b["page_offset"].__setitem__(1, -64), "page_offset"),
    "page off its alignment": (lambda b: b["page_offset"].__setitem__(1, 68), "page_offset"),
    "no open page": (lambda b: b["open_offset"].__setitem__(0, -1), "open_offset"),
    "open page past the end": (lambda b: b["open_offset"].__setitem__(0, 1 << 40), "open_offset"),
    "rows that fall": (lambda b: b["row_start"].__setitem__(1, 120), "row_start"),
    "rows that do not start": (lambda b: b["row_start"].__setitem__(0, 1), "begin with 0"),
    "lists that do not start": (lambda b: b["first_list"].__setitem__(0, 1), "begin with 0"),
    "entries that do not start": (lambda b: b["entry_start"].__setitem__(0, 1), "begin with 0"),
    "negative position": (lambda b: b["position"].__setitem__(0, -1), "position"),
    "position past the table": (lambda b: b["position"].__setitem__(1, 4095), "position"),
    "too few entries": (lambda b: b["entry_start"].__setitem__(1, 1), "lacks an entry for the page from position 32"),
    "entries past the end": (lambda b: b["entry_start"].__setitem__(-1, 99), "entry_start must not fall"),
    "entries that fall": (lambda b: b["entry_start"].__setitem__(2, 1), "segment 1, list 0: entry_start must not fall"),
    "entries left over": (
        lambda b: b.update({name: np.append(b[name], b[name][-1:]) for name in ENTRY_ARRAYS}),
        "must end with",
    ),
    "no list": (
        lambda b: b["first_list"].__setitem__(1, 0),
        "segment 0: has 0 lists of entries; there must be 1, or 3",
    ),
    "a list too many": (lambda b: b["first_list"].__setitem__(1, 2), "segment 0: has 2 lists"),
    "no tokens": (lambda b: b["n_tokens"].__setitem__(3, 0), "segment 1, list 0, entry 1 has 0 tokens"),
    "too many tokens": (lambda b: b["n_tokens"].__setitem__(3, 33), "entry 1 has 33 tokens"),
    "negative entry": (lambda b: b["entry_position"].__setitem__(2, -1), "entry 0 begins at position -1, before"),
    "entries that overlap": (
        lambda b: b["entry_position"].__setitem__(3, 31),
        "segment 1, list 0, entry 1 begins at position 31, before position 32",
    ),
    "entries out of order": (lambda b: b["entry_position"].__setitem__(3, 0), "entry 1 begins at position 0"),
    "an entry into the own page": (
        lambda b: b["entry_position"].__setitem__(4, 65),
        "segment 1, list 0, entry 2 has positions 65 to 96, past the start of the segment's first own page, 96",
    ),
    "a ragged page to seal": (lambda b: b["n_tokens"].__setitem__(5, 31), "entry 3 has 31 tokens from position 96 on"),
    "a page to seal elsewhere": (
        lambda b: b["entry_position"].__setitem__(5, 97),
        "entry 3 has 32 tokens from position 97 on, in place of the 32 from position 96 on",
    ),
    "an entry behind": (lambda b: b["row_start"].__setitem__(2, 95), "entry 3 begins at position 96, but no page from"),
    "no page to seal into": (
        lambda b: b["row_start"].__setitem__(2, 134),
        "lacks an entry for the page from position 128",
    ),
}


@pytest.mark.parametrize("kind", BAD_BATCHES)
def test_contradictory_batches_are_refused(kind: str) -> None:
    """Of two segments: 70 tokens from position 0 on, entries 0 and 1; 30 from position 100 on, entries 2 to 5."""
    world = World(Shape(), [("int8", "int8")])
    later = world.sequence(130)
    world.run(later, [100])
    arrays = world.arrays([(world.sequence(70), 70), (later, 30)])
    step = world.build(arrays)
    before = {name: array.copy() for name, array in arrays.items()}
    damage, message = BAD_BATCHES[kind]
    damage(arrays)
    with pytest.raises(ValueError, match=message):
        world.build(arrays)
    with pytest.raises(ValueError, match=message):
        world.assign(step, arrays)
    world.assign(step, before)


def test_contradictory_formats_are_refused() -> None:
    world = World(Shape(), [("int8", "int8")])
    good = {"keys": [(3, False, 0)], "values": [(3, False, 8192)], "page_bytes": 16384}
    world.cache.add_format(world.context, **good)
    for change, message in (
        ({"keys": [(5, False, 0)]}, "kernel id 5"),
        ({"keys": [(3, False, 32)]}, "multiples of 64"),
        ({"page_bytes": 12000}, "past its page"),
        ({"keys": [(3, False, 0)] * 2, "values": [(3, False, 8192)] * 2}, "2 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            world.cache.add_format(world.context, **{**good, **change})
    for page_size, head_dim, message in (
        (24, 64, "page_size"),
        (32, 60, "head_dim"),
        (32, 1024, "up to 1016"),
        (0, 64, "page_size"),
    ):
        with pytest.raises(ValueError, match=message):
            _cpu.CacheLayout(world.context, page_size, 1, head_dim, 1, SPLIT_PAGES, [], [], 0)
