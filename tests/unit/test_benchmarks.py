"""The arithmetic behind the benchmarks: what is wrong here is wrong in every published figure."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
from benchmarks.agreement import OracleStep, compare
from benchmarks.harness import BenchmarkError, caches, label, perplexity, perplexity_change, spread, table
from benchmarks.memory import bits_by_docstring, waste
from benchmarks.perplexity import windows
from benchmarks.report import BLOCKS, DOCUMENT, updated
from benchmarks.roofline import Kernel, summary
from benchmarks.run import BENCHMARKS
from benchmarks.speed import SAMPLED, Plan, entries, markdown, measure_pair

from octavo.cache.spec import CacheSpec, FullGroup
from octavo.codecs.base import Plane, Role
from octavo.codecs.registry import get_codec


def step(token: int, gap: float, runner_up: int = 99) -> OracleStep:
    return OracleStep(token, -0.5, runner_up, -0.5 - gap)


def test_equal_texts_agree() -> None:
    result = compare([step(1, 2.0), step(2, 0.01)], [1, 2])
    assert result.agrees
    assert result.equal
    assert result.n_equal == 2


def test_a_difference_at_a_tie_agrees_and_what_follows_does_not_matter() -> None:
    result = compare([step(1, 2.0), step(2, 0.04, runner_up=7), step(3, 5.0)], [1, 7, 8])
    assert result.agrees
    assert not result.equal
    assert result.n_equal == 1
    assert result.gap == pytest.approx(0.04)


@pytest.mark.parametrize(("gap", "taken"), [(0.06, 7), (0.04, 8)])
def test_a_clear_choice_or_a_third_token_is_a_disagreement(gap: float, taken: int) -> None:
    assert not compare([step(2, gap, runner_up=7)], [taken]).agrees


def test_perplexity_change_is_that_of_the_perplexities_when_windows_are_alike() -> None:
    rng = np.random.default_rng(0)
    base = rng.gamma(2.0, 1.0, (8, 100))
    change = perplexity_change((base + 0.01).tolist(), base.tolist())
    assert change.percent == pytest.approx(100 * (math.exp(0.01) - 1))
    assert change.standard_error == pytest.approx(0.0, abs=1e-9)
    ratio = perplexity((base + 0.01).tolist()) / perplexity(base.tolist())
    assert change.percent == pytest.approx(100 * (ratio - 1))


def test_the_standard_error_covers_the_truth_about_as_often_as_it_should() -> None:
    rng = np.random.default_rng(1)
    truth, covered = 0.02, 0
    for _ in range(300):
        hardness = rng.normal(3.0, 0.5, (10, 1))
        base = hardness + rng.normal(0.0, 1.0, (10, 64))
        nll = base + truth + rng.normal(0.0, 0.1, (10, 1))
        change = perplexity_change(nll.tolist(), base.tolist())
        covered += abs(math.log1p(change.percent / 100) - truth) < 2 * change.standard_error / 100
    assert 0.85 < covered / 300 < 0.99


def test_windows_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="not the same text"):
        perplexity_change([[1.0, 2.0]], [[1.0]])


def test_windows_are_spread_over_the_whole_text() -> None:
    found = windows(list(range(1000)), 4, 100)
    assert [w[0] for w in found] == [0, 300, 600, 900]
    assert {len(w) for w in found} == {100}
    with pytest.raises(BenchmarkError, match="do not fit"):
        windows(list(range(399)), 4, 100)


def test_spread_and_table() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "n": 3}
    assert table(["a", "b"], [["x", "1"]]).splitlines() == ["| a | b |", "| --- | ---: |", "| x | 1 |"]


@pytest.mark.parametrize("codec", ["f32", "f16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_codecs_allocate_what_their_docstrings_state(codec: str, page_size: int) -> None:
    for role, bits in zip(Role, bits_by_docstring(codec, page_size, 64), strict=True):
        plane = Plane(role, page_size, 3, 64)
        assert 8 * get_codec(codec).bytes_per_page(plane) == bits * plane.n_values


@pytest.mark.parametrize("codec", ["f16", "int8/int4", "int4"])
def test_waste_adds_up_and_knows_the_open_pages(codec: str) -> None:
    spec = CacheSpec((FullGroup((0, 1, 2), 2, 64),))
    exact, ragged = waste(spec, 32, codec, [320]), waste(spec, 32, codec, [320, 33])
    token_bytes = 2 * 3 * 2 * 64 * 4
    assert exact.open_used == 0
    assert ragged.open_used == token_bytes
    assert ragged.open_unused == 31 * token_bytes
    assert exact.payload == 10 * ragged.payload // 11
    assert exact.payload + exact.wasted == exact.total


def test_the_report_replaces_its_blocks_and_nothing_else() -> None:
    document = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    once = updated(document, {"x": r"new \1 text"})
    assert once == "a\n<!-- begin x -->\nnew \\1 text\n<!-- end x -->\nb\n"
    assert updated(once, {"x": r"new \1 text"}) == once
    with pytest.raises(BenchmarkError, match="begin y"):
        updated(document, {"y": ""})


def test_the_document_has_every_block() -> None:
    text = DOCUMENT.read_text()
    for name in BLOCKS:
        assert text.count(f"<!-- begin {name} -->") == text.count(f"<!-- end {name} -->") == 1


def test_a_pair_names_its_peer_cache_or_takes_the_one_of_its_size() -> None:
    assert caches("llama.cpp", "int8") == ("int8", "q8_0")
    assert caches("OpenVINO", "int4:u8") == ("int4", "u8")
    assert label("OpenVINO", "f16:f32") == "f16 / f32"


def test_shares_of_a_ceiling_are_formed_turn_by_turn() -> None:
    """A machine that halves its speed halves both."""
    kernel = Kernel("k", lambda: 0.0, 1, 1, "i16", rates=[(5.0, 50.0), (10.0, 100.0), (20.0, 200.0)])
    ceilings = {"read": [10.0, 20.0, 40.0], "i16": [100.0, 200.0, 400.0], "i8": [200.0, 400.0, 800.0], "f32": [1.0] * 3}
    assert summary(kernel, ceilings)["share"] == {"read": 0.5, "i16": 0.5, "i8": 0.25}


class Scripted:
    """A worker that answers at once and keeps what it was asked."""

    def __init__(self) -> None:
        self.decodes: list[dict[str, Any]] = []

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        if command == "prefill":
            return {"seconds": {str(mark): mark / 1000 for mark in arguments["marks"]}}
        self.decodes.append(arguments)
        return {"seconds": [0.02 if "temperature" in arguments else 0.01] * arguments["n"]}


def test_decode_is_measured_greedily_and_from_the_shortest_context_with_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.speed.SETTLE_S", 0.0)
    plan = Plan(prefill=(64,), decode=(16, 64), runs=2, decode_tokens=4)
    worker, peer = Scripted(), Scripted()
    measured = measure_pair(worker, peer, list(range(64)), plan, sampled=True)  # type: ignore[arg-type]
    assert worker.decodes == peer.decodes
    assert worker.decodes[-2:] == [{"context": 16, "n": 4, **SAMPLED}] * 2
    assert [(how != "", n) for how, n, _ in entries(measured, "decode")] == [(False, "16"), (False, "64"), (True, "16")]
    assert [how for how, _, _ in entries(measured, "prefill")] == [""]
    assert "| f16 / f16, temperature 0.8, top_p 0.95 | 16 | 50.0 (50.0-50.0)" in markdown(
        "llama.cpp", {"f16": measured}, "decode"
    )
    assert measure_pair(worker, peer, list(range(64)), plan, sampled=False)["sampled"] == {}  # type: ignore[arg-type]


def test_every_benchmark_is_a_module() -> None:
    for module, _, _ in BENCHMARKS.values():
        assert importlib.util.find_spec(f"benchmarks.{module}") is not None
