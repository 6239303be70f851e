"""Embedding, MLP, head and log-softmax of the cpu backend, through CpuOps."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from octavo.errors import ConfigError, LoadError
from octavo.models.spec import MlpWeights, ModelSpec, RopeSpec
from octavo.ops import _cpu
from octavo.ops.cpu import CpuOps
from tests.kernels.linear_world import (
    F32,
    F64,
    TYPES,
    activations,
    dequantize,
    isas,
    random_weight,
    read_as,
    rms_norm,
)

SPEC = ModelSpec(
    architecture="llama", vocab_size=300, d_model=256, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=512,
    norm_eps=1e-5, context_length=128, rope=RopeSpec(1e4, 64),
)  # fmt: skip


@cache
def ops(threads: int = 2, isa: str = "auto") -> CpuOps:
    return CpuOps(threads=threads, isa=isa)


def mlp_weights(gate: str, up: str, down: str, spec: ModelSpec = SPEC) -> MlpWeights:
    norm = np.random.default_rng(4).standard_normal(spec.d_model).astype(np.float32)
    return MlpWeights(
        norm,
        random_weight(gate, spec.d_ff, spec.d_model, seed=1),
        random_weight(up, spec.d_ff, spec.d_model, seed=2),
        random_weight(down, spec.d_model, spec.d_ff, seed=3),
    )


def mlp_oracle(w: MlpWeights, hidden: F32) -> F64:
    x = rms_norm(hidden, w.norm, SPEC.norm_eps).astype(np.float32)
    gate = read_as(w.gate.dtype, x) @ dequantize(w.gate).T
    up = read_as(w.up.dtype, x) @ dequantize(w.up).T
    with np.errstate(over="ignore"):
        middle = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
    return hidden + read_as(w.down.dtype, middle) @ dequantize(w.down).T


MIXES = [
    ("Q4_1", "Q4_1", "Q4_1"),
    ("Q5_0", "Q5_0", "Q6_K"),
    ("Q4_K", "Q8_0", "Q5_K"),
    ("F32", "F32", "F32"),
    ("BF16", "F16", "Q4_0"),
    ("Q5_1", "Q4_0", "F16"),
]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("types", MIXES)
def test_mlp_equals_its_oracle(types: tuple[str, str, str], isa: str) -> None:
    weights = mlp_weights(*types)
    block = ops(isa=isa).prepare_mlp(SPEC, weights)
    for n in (1, 2, 5, 70):
        hidden = activations(n, SPEC.d_model, seed=n)
        expected = mlp_oracle(weights, hidden)
        ops(isa=isa).mlp_block(block, hidden)
        # A rounding that tips a 16-bit code moves the result by about 1 / 32767 of one input.
        assert np.abs(hidden - expected).max() < 2e-5 * np.abs(expected).max(), n


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("types", MIXES)
def test_mlp_rows_do_not_depend_on_the_call(types: tuple[str, str, str], isa: str) -> None:
    block = ops(isa=isa).prepare_mlp(SPEC, mlp_weights(*types))
    start = activations(70, SPEC.d_model)
    together = start.copy()
    ops(isa=isa).mlp_block(block, together)
    for threads in (1, 2, 5):
        for first, last in ((0, 1), (69, 70), (3, 7), (1, 66), (0, 70)):
            part = start[first:last].copy()
            ops(threads, isa).mlp_block(block, part)
            assert (part == together[first:last]).all(), (threads, first, last)


def test_mlp_of_odd_width_with_float_weights() -> None:
    spec = replace(SPEC, d_ff=77, d_model=30)
    weights = mlp_weights("F32", "F16", "BF16", spec)
    block = ops().prepare_mlp(spec, weights)
    hidden = activations(9, 30)
    expected = mlp_oracle(weights, hidden)
    ops().mlp_block(block, hidden)
    assert np.abs(hidden - expected).max() < 1e-6 * np.abs(expected).max()


def test_mlp_weights_that_do_not_fit_are_refused() -> None:
    w = mlp_weights("Q4_0", "Q4_0", "Q4_0")
    with pytest.raises(LoadError, match="do not fit together"):
        ops().prepare_mlp(SPEC, replace(w, down=w.gate))
    with pytest.raises(LoadError, match="norm before tensor w has 100 values"):
        ops().prepare_mlp(SPEC, replace(w, norm=w.norm[:100].copy()))
    block = ops().prepare_mlp(SPEC, w)
    with pytest.raises(ValueError, match=r"hidden: .*\[n, 256\], got float32 \[2, 255\]"):
        ops().mlp_block(block, np.zeros((2, 255), np.float32))


@pytest.mark.parametrize("dtype", TYPES)
def test_embedding_rows_equal_the_stored_ones(dtype: str) -> None:
    table = random_weight(dtype, 300, 256)
    w = dequantize(table).astype(np.float32)
    tokens = np.array([0, 299, 7, 7, 128], np.int32)
    embedding = ops().prepare_embedding(table)
    assert (ops().embed(embedding, tokens) == w[tokens]).all()
    many = np.random.default_rng(0).integers(0, 300, 1000).astype(np.int32)
    assert (ops().embed(embedding, many) == w[many]).all()
    assert ops().embed(embedding, np.empty(0, np.int32)).shape == (0, 256)
    order = np.random.default_rng(1).permutation(300).astype(np.int32)
    shuffled = ops().prepare_embedding(replace(table, row_order=order))
    assert (ops().embed(shuffled, tokens) == w[order[tokens]]).all()


def test_embedding_refuses_tokens_outside_the_vocabulary() -> None:
    embedding = ops().prepare_embedding(random_weight("Q8_0", 300, 256))
    for token in (300, -1):
        with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 300"):
            ops().embed(embedding, np.array([5, token], np.int32))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", ["Q8_0", "Q6_K", "F16"])
def test_head_gives_logits_of_the_chosen_rows(dtype: str, isa: str) -> None:
    weight = random_weight(dtype, SPEC.vocab_size, SPEC.d_model)
    norm = np.random.default_rng(2).standard_normal(SPEC.d_model).astype(np.float32)
    head = ops(isa=isa).prepare_head(SPEC, norm, weight)
    hidden = activations(20, SPEC.d_model)
    before = hidden.copy()
    rows = [19, 0, 3, 3]
    logits = ops(isa=isa).head(head, hidden, rows)
    x = rms_norm(hidden, norm, SPEC.norm_eps)[rows].astype(np.float32)
    exact = read_as(dtype, x) @ dequantize(weight).T
    assert logits.shape == (4, 300)
    assert np.abs(logits - exact).max() < 1e-5 * np.abs(exact).max()
    assert (hidden == before).all()
    everything = ops(1, isa).head(head, hidden, np.arange(20, dtype=np.int64))
    assert (everything[rows] == logits).all()
    with pytest.raises(ValueError, match="row 20 is outside the 20"):
        ops(isa=isa).head(head, hidden, [20])


@pytest.mark.parametrize("isa", isas())
def test_log_softmax(isa: str) -> None:
    rng = np.random.default_rng(6)
    for vocab in (1, 7, 300, 2048, 2055, 49152):
        logits = (rng.standard_normal((5, vocab)) * 12).astype(np.float32)
        logits[1] += 3000
        logits[2, :: max(2, vocab // 3)] = -np.inf
        logits[3] = -7.25
        if vocab == 1:
            logits[2] = 0
        out = ops(isa=isa).log_softmax(logits)
        x = logits.astype(np.float64)
        peak = x.max(-1, keepdims=True)
        exact = x - peak - np.log(np.exp(x - peak).sum(-1, keepdims=True))
        finite = np.isfinite(exact)
        assert np.abs(out[finite] - exact[finite]).max() < 1e-5
        assert (out[~finite] == -np.inf).all()
        for i in range(5):
            assert (ops(1, isa).log_softmax(logits[i : i + 1]) == out[i]).all()
    poisoned = np.zeros((1, 100), np.float32)
    poisoned[0, 50] = np.nan
    assert np.isnan(ops(isa=isa).log_softmax(poisoned)).all()


def test_two_python_threads_may_share_a_context() -> None:
    block = ops().prepare_mlp(SPEC, mlp_weights("Q4_1", "Q4_1", "Q4_1"))
    start = [activations(n, SPEC.d_model, seed=n) for n in (1, 40)]
    expected = [x.copy() for x in start]
    for x in expected:
        ops().mlp_block(block, x)
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(100):
            x = start[which].copy()
            ops().mlp_block(block, x)
            if not (x == expected[which]).all():
                wrong.append(which)

    workers = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_impossible_settings_are_refused() -> None:
    assert ops().arithmetic == f"{ops().context.isa}/{_cpu.KERNEL_REVISION}"
    with pytest.raises(ConfigError, match="isa must be auto, portable, avx2 or avx512"):
        CpuOps(isa="sse9")
    with pytest.raises(ConfigError, match="threads must be from 1 to 512, got -2"):
        CpuOps(threads=-2)
    if not _cpu.have_isa("avx512"):
        with pytest.raises(ConfigError, match=r"avx512.*lacks"):
            CpuOps(isa="avx512")
