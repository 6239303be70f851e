"""Logits against Hugging Face transformers on the same weights, and greedy text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import LLM, CachePolicy, SamplingParams
from octavo.engine.engine import Engine

F32 = CachePolicy("f32", "f32")
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"head_dim": 32}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
]  # fmt: skip


def logits_of(engine: Engine, tokens: list[int]) -> np.ndarray:
    """float32 [n, vocab]: logits of every prompt row, caught where the runner hands them out."""
    rows: list[np.ndarray] = []
    original = engine._runner.logits

    def catching(*args: Any) -> np.ndarray:
        result = original(*args)
        rows.append(result.copy())
        return result

    engine._runner.logits = catching  # type: ignore[method-assign]
    last = engine._runner.last_logits

    def catching_last(*args: Any) -> np.ndarray:
        result = last(*args)
        rows.append(result.copy())
        return result

    engine._runner.last_logits = catching_last  # type: ignore[method-assign]
    llm = LLM.from_engine(engine)
    llm.generate(tokens, SamplingParams(max_tokens=1, prompt_logprobs=0))
    return np.concatenate(rows)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("kind", "overrides"), KINDS)
def test_logits(backend: str, kind: str, overrides: dict[str, Any], tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint(kind, **overrides)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = np.random.default_rng(1).integers(0, oracle.config.vocab_size, 150).tolist()
    with torch.no_grad():
        want = oracle(torch.tensor([tokens])).logits[0].numpy()
    with LLM(str(path), backend=backend, policy=F32, page_size=16, step_tokens=40, threads=2) as llm:
        got = logits_of(llm.engine, tokens)  # type: ignore[arg-type]
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()
        output = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    with torch.no_grad():
        text = oracle.generate(
            torch.tensor([tokens]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(tokens) :]
    assert output.outputs[0].token_ids == text.tolist()
