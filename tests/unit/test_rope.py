"""Rotary frequencies against transformers, and tables against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.errors import UnsupportedError
from octavo.models.rope import rope_frequencies, rope_tables
from octavo.models.spec import RopeScaling, RopeSpec

CASES = {
    "linear": (RopeScaling("linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeScaling("llama3", factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        RopeScaling("yarn", factor=4.0, original_context=32768),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn untruncated": (
        RopeScaling("yarn", factor=32.0, original_context=4096, truncate=False, beta_fast=24.0, beta_slow=2.0),
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
        },
    ),
    "yarn mscale": (
        RopeScaling("yarn", factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=0.707),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
    ),
    "yarn attention factor": (
        RopeScaling("yarn", factor=2.0, original_context=4096, attention_factor=1.25),
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.25,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 128), (1e6, 80)])
def test_frequencies_equal_transformers(case: str, theta: float, head_dim: int) -> None:
    scaling, parameters = CASES[case]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=int(parameters.get("original_max_position_embeddings", 4096)),
        rope_parameters={"rope_theta": theta, **parameters},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device=None)
    frequencies, ours = rope_frequencies(RopeSpec(theta, head_dim, scaling))
    assert np.allclose(frequencies, expected.numpy(), rtol=2e-6, atol=0)
    assert ours == pytest.approx(factor, rel=1e-12)


def test_scalings_differ() -> None:
    """The comparison above would pass vacuously if all cases gave the same numbers."""
    plain, _ = rope_frequencies(RopeSpec(10000.0, 64))
    for scaling, _ in CASES.values():
        assert not np.allclose(rope_frequencies(RopeSpec(10000.0, 64, scaling))[0], plain, rtol=1e-2)


def test_explicit_divisors() -> None:
    divisors = tuple(1.0 + i for i in range(32))
    plain, _ = rope_frequencies(RopeSpec(10000.0, 64))
    scaled, factor = rope_frequencies(RopeSpec(10000.0, 64, RopeScaling("explicit", divisors=divisors)))
    assert np.array_equal(scaled, plain / np.array(divisors))
    assert factor == 1.0


def test_tables_are_exact_at_long_positions() -> None:
    rope = RopeSpec(1e5, 64, RopeScaling("yarn", factor=4.0, original_context=32768))
    cos, sin = rope_tables(rope, 131072)
    assert cos.shape == sin.shape == (131072, 32)
    assert cos.dtype == sin.dtype == np.float32
    factor = 0.1 * math.log(4.0) + 1.0
    frequencies, _ = rope_frequencies(rope)
    for position, i in ((0, 5), (1, 0), (131071, 0), (131071, 3), (77777, 31)):
        angle = position * float(frequencies[i])
        assert cos[position, i] == np.float32(math.cos(angle) * factor)
        assert sin[position, i] == np.float32(math.sin(angle) * factor)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (RopeSpec(1e4, 63), "63"),
        (RopeSpec(1e4, 64, RopeScaling("explicit", divisors=(1.0, 2.0))), "2 divisors for 32"),
        (RopeSpec(1e4, 64, RopeScaling("linear", factor=0.0)), "factor"),
        (RopeSpec(1e4, 64, RopeScaling("yarn", factor=2.0)), "trained"),
        (RopeSpec(1e4, 64, RopeScaling("llama3", factor=2.0)), "trained"),
    ],
)
def test_contradictory_specs_are_refused(rope: RopeSpec, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        rope_frequencies(rope)
