"""Greedy text of the catalog's GGUF files against transformers in float32 on the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from benchmarks.agreement import OracleStep, compare
from benchmarks.prompts import encoded

from octavo import LLM, CachePolicy, SamplingParams

N_TOKENS = 64


def oracle_steps(oracle: transformers.PreTrainedModel, prompt: list[int], continuation: list[int]) -> list[OracleStep]:
    """The oracle's greedy choice at every token of a continuation."""
    with torch.inference_mode():
        rows = torch.tensor([prompt + continuation[:-1]])
        top = torch.log_softmax(oracle(rows, logits_to_keep=len(continuation)).logits[0], dim=-1).topk(2)
    return [
        OracleStep(best, logprob, second, second_logprob)
        for (best, second), (logprob, second_logprob) in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def check(path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
    with LLM(str(path), policy=CachePolicy("f32", "f32"), kv_memory="256MiB", max_model_len=512, threads=2) as llm:
        prompts = encoded(llm.tokenizer)
        outputs = llm.generate([tokens for _, tokens in prompts], greedy)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    wrong = []
    for (text, tokens), output in zip(prompts, outputs, strict=True):
        got = output.outputs[0].token_ids
        assert len(got) == N_TOKENS
        agreement = compare(oracle_steps(oracle.eval(), tokens, got), got)
        if not agreement.agrees:
            wrong.append(f"{text!r}: {agreement}")
    assert not wrong, "\n".join(wrong)


def test_smollm2(smollm2: Path) -> None:
    check(smollm2)


@pytest.mark.slow
def test_qwen_coder(qwen_coder: Path) -> None:
    check(qwen_coder)
