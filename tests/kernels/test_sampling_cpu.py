"""Sampling: the reference against exact distributions, and the cpu backend against the reference."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from octavo.ops.base import Ops, Sampling
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps
from tests.kernels.linear_world import F32, F64, isas

VOCABULARIES = [1, 7, 8, 9, 63, 64, 65, 1000, 4096, 4097, 50_000]

#: temperature, top_k, top_p, min_p. A top_k beyond a vocabulary keeps all of it.
KINDS: list[tuple[float, int, float, float]] = [
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (100.0, 0, 1.0, 0.0), (1e-6, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0), (1.0, 40, 1.0, 0.0), (2.0, 900, 1.0, 0.0), (1.0, 2**31 - 1, 1.0, 0.0),
    (0.8, 0, 0.95, 0.0), (1.0, 0, 0.5, 0.0), (3.0, 0, 0.9999, 0.0), (1.0, 0, 1e-9, 0.0), (100.0, 0, 0.7, 0.0),
    (1.0, 0, 1.0, 0.05), (1.0, 0, 1.0, 1.0), (5.0, 0, 1.0, 1e-6),
    (1.0, 40, 0.9, 0.0), (1.0, 1500, 0.99, 0.02), (1.5, 0, 0.9, 0.1), (1.5, 300, 1.0, 0.2),
]  # fmt: skip


@cache
def cpu(isa: str, threads: int = 2) -> CpuOps:
    return CpuOps(threads=threads, isa=isa)  # type: ignore[arg-type]


REFERENCE = ReferenceOps()


def sampling(kinds: list[tuple[float, int, float, float]], uniform: Any) -> Sampling:
    temperature, top_k, top_p, min_p = zip(*kinds, strict=True)
    return Sampling(
        np.array(temperature), np.array(top_k, np.int32), np.array(top_p), np.array(min_p), np.array(uniform)
    )


def logits_of(kind: str, n: int, rows: int, rng: np.random.Generator) -> F32:
    logits = (rng.standard_normal((rows, n)) * 3).astype(np.float32)
    if kind == "peaked":
        logits[:, :: max(1, n // 9)] += 12
    elif kind == "rounded":  # many ties, as float16 weights make them
        logits = np.round(logits * 2) / 2
    elif kind == "equal":
        logits[:] = -7.25
    elif kind == "huge":
        logits[:, n // 2] = 3e38
    elif kind == "masked":  # all but a few
        logits[:, n // 3 + 1 :] = -np.inf
        logits[:, 0] = -3e38
    return logits


def is_close_to_an_edge(row: F32, kind: tuple[float, int, float, float], uniform: float) -> bool:
    """Whether `uniform` or top_p lies within 1e-6 of where another token would be drawn or kept."""
    temperature, top_k, top_p, min_p = kind
    x = row.astype(np.float64)
    weights = np.exp((x - x.max()) / temperature)
    kept = np.argsort(-x, kind="stable")[: top_k or len(x)]
    if top_p < 1:
        cumulative = np.cumsum(weights[kept]) / weights[kept].sum()
        if np.abs(cumulative - top_p).min() < 1e-6:
            return True
        kept = kept[: np.searchsorted(cumulative, top_p) + 1]
    if min_p > 0:
        kept = kept[x[kept] >= x.max() + temperature * math.log(min_p)]
    cumulative = np.cumsum(weights[np.sort(kept)])
    return bool(np.abs(cumulative / cumulative[-1] - uniform).min() < 1e-6)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", ["normal", "peaked", "rounded", "equal", "huge", "masked"])
def test_cpu_draws_what_the_reference_draws(isa: str, kind: str) -> None:
    rng = np.random.default_rng(5)
    different = 0
    for n in VOCABULARIES:
        repeats = 4 if n > 10_000 else 12
        kinds = KINDS * repeats
        logits = logits_of(kind, n, len(kinds), rng)
        uniform = rng.random(len(kinds))
        uniform[: len(KINDS)] = 0.0
        uniform[len(KINDS) : 2 * len(KINDS)] = 1 - 2**-53
        want = REFERENCE.sample(logits, sampling(kinds, uniform))
        got = cpu(isa).sample(logits, sampling(kinds, uniform))
        assert got.dtype == np.int32
        for i in np.nonzero(want != got)[0]:
            assert is_close_to_an_edge(logits[i], kinds[i], uniform[i]), (n, kinds[i], uniform[i], want[i], got[i])
            different += uniform[i] not in (0.0, 1 - 2**-53)
    assert different < 10


def exact(logits: F32, kind: tuple[float, int, float, float]) -> F64:
    """Probabilities by definition, one token after the other."""
    temperature, top_k, top_p, min_p = kind
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or len(logits)]
    weight = {i: math.exp((float(logits[i]) - float(logits.max())) / temperature) for i in order}
    total, sum_ = sum(weight.values()), 0.0
    kept = []
    for i in order:
        if sum_ < top_p * total or not kept:
            kept.append(i)
        sum_ += weight[i]
    kept = [i for i in kept if weight[i] >= min_p]
    probabilities = np.zeros(len(logits))
    for i in kept:
        probabilities[i] = weight[i] / sum(weight[j] for j in kept)
    return probabilities


@pytest.mark.parametrize("ops", [cpu("auto"), REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k[0]])
def test_draws_follow_the_distribution(ops: Ops, kind: tuple[float, int, float, float]) -> None:
    """Pearson's chi-square stays below the mean plus five standard deviations; what is filtered out is never drawn."""
    rng = np.random.default_rng(11)
    logits = (rng.standard_normal(12) * 1.5).astype(np.float32)
    kind = (kind[0], min(kind[1], 5), *kind[2:])
    draws = 20_000
    tokens = ops.sample(np.tile(logits, (draws, 1)), sampling([kind] * draws, rng.random(draws)))
    counts, p = np.bincount(tokens, minlength=12), exact(logits, kind)
    assert (counts[p == 0] == 0).all()
    seen = p * draws >= 5
    chi_square = ((counts[seen] - p[seen] * draws) ** 2 / (p[seen] * draws)).sum()
    freedom = max(1, int(seen.sum()) - 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("isa", isas())
def test_a_row_knows_nothing_of_its_mates(isa: str) -> None:
    rng = np.random.default_rng(3)
    for n in (9, 4097, 50_000):
        logits = logits_of("normal", n, len(KINDS), rng)
        uniform = rng.random(len(KINDS))
        together = cpu(isa, 3).sample(logits, sampling(KINDS, uniform))
        for i, kind in enumerate(KINDS):
            alone = cpu(isa, 1).sample(logits[i : i + 1], sampling([kind], uniform[i : i + 1]))
            assert alone == together[i]
        assert (together == cpu("portable", 1).sample(logits, sampling(KINDS, uniform))).all()


@pytest.mark.parametrize("isa", isas())
def test_rows_that_are_not_finite(isa: str) -> None:
    for n in (1, 9, 5000):
        for kind in KINDS:
            logits = np.zeros((6, n), np.float32)
            logits[1, n - 1], logits[3, 0], logits[4, n // 2], logits[5] = np.nan, np.inf, -np.nan, -np.inf
            s = sampling([kind] * 6, [0.5] * 6)
            got = cpu(isa).sample(logits, s)
            assert (got[[1, 3, 4, 5]] == -1).all()
            assert got[0] == got[2] >= 0
            assert ((REFERENCE.sample(logits, s) == -1) == (got == -1)).all()


def test_arrays_are_checked() -> None:
    logits = np.zeros((2, 5), np.float32)
    with pytest.raises(ValueError, match="logits"):
        cpu("auto").sample(logits.astype(np.float64), sampling(KINDS[:2], [0.5, 0.5]))
    with pytest.raises(ValueError, match="temperature"):
        cpu("auto").sample(logits, sampling(KINDS[:3], [0.5] * 3))
    with pytest.raises(ValueError, match="vocabulary is empty"):
        cpu("auto").sample(logits[:, :0], sampling(KINDS[:2], [0.5] * 2))
    none = Sampling(np.empty(0), np.empty(0, np.int32), np.empty(0), np.empty(0), np.empty(0))
    assert cpu("auto").sample(logits[:0], none).shape == (0,)
