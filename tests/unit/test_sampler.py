"""Sampling against plain definitions over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.messages import SamplingParams
from octavo.engine.sampler import Sampler, largest, sample, token_logprob
from octavo.errors import OctavoError, RequestError
from octavo.ops.cpu import CpuOps

VOCAB = 1000
OPS = CpuOps(threads=1)


def choose(sampler: Sampler, row: np.ndarray, position: int) -> int:
    """The token of one choice alone."""
    logits = row[None]
    (token,) = sample(OPS, logits, [sampler.draw(logits, 0, position)])
    sampler.accept(token)
    return token


def logits(seed: int, n: int = VOCAB, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def allowed(row: np.ndarray, p: SamplingParams) -> set[int]:
    """The tokens that top_k, top_p and min_p leave, by definition, one filter after the other."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if p.top_k:
        order = order[: p.top_k]
    weights = np.exp(row[order].astype(np.float64) / p.temperature)
    probabilities = weights / weights.sum()
    if p.top_p < 1:
        order = order[: int(np.argmax(np.cumsum(probabilities) >= p.top_p)) + 1]
    return {i for j, i in enumerate(order) if probabilities[j] >= p.min_p * probabilities[0]}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 5, 300, 5000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.999]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_draws_stay_within_the_filters(seed: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    row = logits(seed)
    keep = allowed(row, params)
    sampler = Sampler(params, seed, 0, [])
    drawn = {choose(sampler, row, position) for position in range(30)}
    assert drawn <= keep


def test_draws_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = Sampler(SamplingParams(), 3, 0, [])
    counts = np.bincount([choose(sampler, row, i) for i in range(8000)], minlength=4) / 8000
    assert np.abs(counts - [0.5, 0.3, 0.15, 0.05]).max() < 0.02


def test_top_p_leaves_the_renormalized_distribution() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = Sampler(SamplingParams(top_p=0.75), 3, 0, [])
    counts = np.bincount([choose(sampler, row, i) for i in range(8000)], minlength=4) / 8000
    assert np.abs(counts - [0.625, 0.375, 0, 0]).max() < 0.02


def test_a_draw_depends_on_seed_choice_and_position_alone() -> None:
    row = logits(1)
    params = SamplingParams()
    one, two = Sampler(params, 5, 0, []), Sampler(params, 5, 0, [1, 2, 3])
    forward = [choose(one, row, i) for i in range(20)]
    backward = [choose(two, row, i) for i in reversed(range(20))][::-1]
    assert forward == backward
    assert forward != [choose(Sampler(params, 5, 1, []), row, i) for i in range(20)]
    assert forward != [choose(Sampler(params, 6, 0, []), row, i) for i in range(20)]


def test_negative_seeds_are_seeds() -> None:
    row = logits(1)
    a = [choose(Sampler(SamplingParams(), -1, 0, []), row, i) for i in range(10)]
    b = [choose(Sampler(SamplingParams(), 1, 0, []), row, i) for i in range(10)]
    assert a != b


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = np.array([1, 3, 3, 2], dtype=np.float32)
    assert choose(Sampler(SamplingParams(temperature=0), 0, 0, []), row, 0) == 1


def test_penalties_and_bias() -> None:
    row = np.array([2.0, 1.9, -1.0, 0.0], dtype=np.float32)

    def greedy(prompt: list[int], steps: int, **params: Any) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=0, **params), 0, 0, prompt)
        return [choose(sampler, row, i) for i in range(steps)]

    assert greedy([], 2, presence_penalty=0.5) == [0, 1]
    assert greedy([0], 1, presence_penalty=0.5) == [0], "presence counts generated tokens only"
    assert greedy([], 4, frequency_penalty=0.15) == [0, 1, 0, 1]
    assert greedy([0], 1, repetition_penalty=1.5) == [1], "repetition counts the prompt too"
    assert greedy([], 1, logit_bias={3: 100.0}) == [3]
    assert greedy([], 1, logit_bias={0: -100.0}) == [1]
    before = row.copy()
    greedy([], 3, presence_penalty=0.5, logit_bias={3: 5.0})
    assert (row == before).all(), "logits belong to the caller"


def test_a_row_may_be_drawn_from_more_than_once_beside_penalized_ones() -> None:
    logits_ = np.stack([logits(1), logits(2)])
    before = logits_.copy()
    kinds = [
        (0, SamplingParams()), (0, SamplingParams(top_p=0.9)), (0, SamplingParams(temperature=0)),
        (1, SamplingParams(logit_bias={3: 100.0})), (1, SamplingParams(repetition_penalty=1.5, min_p=0.01)),
    ]  # fmt: skip
    samplers = [Sampler(params, 7, i, [1, 2]) for i, (_, params) in enumerate(kinds)]
    draws = [s.draw(logits_, row, 40) for s, (row, _) in zip(samplers, kinds, strict=True)]
    together = sample(OPS, logits_, draws)
    alone = [choose(s, logits_[row], 40) for s, (row, _) in zip(samplers, kinds, strict=True)]
    assert together == alone
    assert together[3] == 3
    assert (logits_ == before).all(), "reported log-probabilities are those of the model"
    assert sample(OPS, logits_, []) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(value: float, temperature: float) -> None:
    rows = np.stack([logits(i) for i in range(3)])
    rows[1, 700] = value
    samplers = [Sampler(SamplingParams(temperature=temperature), 0, i, []) for i in range(3)]
    tokens = sample(OPS, rows, [s.draw(rows, i, 0) for i, s in enumerate(samplers)])
    assert tokens[1] == -1
    assert [tokens[0], tokens[2]] == [choose(samplers[i], rows[i], 0) for i in (0, 2)]
    with pytest.raises(OctavoError, match="not finite"):
        samplers[1].accept(tokens[1])


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=40), k=st.integers(1, 50))
def test_largest_is_a_stable_sort(values: list[int], k: int) -> None:
    row = np.array(values, dtype=np.float32)
    k = min(k, len(values))
    assert largest(row, k).tolist() == sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def test_token_logprob_lists_the_likeliest() -> None:
    row = np.log(np.array([0.2, 0.5, 0.3], dtype=np.float32))
    entry = token_logprob(row, 0, 2)
    assert entry.token_id == 0
    assert [t for t, _ in entry.top] == [1, 2]
    assert token_logprob(row, 0, 0).top == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -1.0),
        ("top_k", -2), ("n", 0), ("n", 65), ("max_tokens", -1), ("logprobs", 21), ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5), ("seed", 1 << 63), ("logit_bias", {3: 101.0}), ("logit_bias", {-1: 0.0}),
        ("stop", ("",)),
    ],
)  # fmt: skip
def test_out_of_range_values_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
