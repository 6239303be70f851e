"""Forty requests to real models, and what their answers are known by: a digest of tokens and log-probabilities.

    python -m tests.recorded.requests avx2 avx512      # writes recorded.json anew, for these instruction sets

Run it only when the arithmetic is meant to change, together with the kernel revision.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path

from octavo import LLM, CachePolicy, SamplingParams
from octavo.config import Isa
from octavo.llm import RequestOutput

RECORDED = Path(__file__).with_name("recorded.json")
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b")
CODECS = ("f32", "f16", "int8", "int4")

#: Neither codec's smallest cache that holds one such sequence holds two, so that one of a batch is preempted.
MAX_LEN = 370

STORY = (
    "The lighthouse keeper kept a ledger of every ship that passed, and beside each name he wrote what the weather had "
    "been, what the gulls had done, and whether the captain had answered his lamp. In the autumn of the ninth year a "
    "ship came by that had no name on her bow. He wrote down the hour and left the rest of the line empty. "
)
CODE = "def merge(left, right):\n    result = []\n    while left and right:\n        result.append("
GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=4, ignore_eos=True)


def run(model: str, codec: str, isa: Isa) -> list[str]:
    """One digest for each of the five requests: cold, hit, fork, and a batch of two that preempts."""
    with LLM(
        model, isa=isa, threads=2, max_num_seqs=4, step_tokens=96, max_model_len=MAX_LEN,
        policy=CachePolicy(codec, codec), kv_memory=budget(model, codec),
    ) as llm:  # fmt: skip
        cold = llm.generate(STORY, GREEDY)
        hit = llm.generate(STORY + CODE, GREEDY)
        assert cold.cached_tokens == 0
        assert hit.cached_tokens >= 64
        fork = llm.generate(CODE, SamplingParams(temperature=0, n=3, max_tokens=20, logprobs=4, ignore_eos=True))
        long = SamplingParams(temperature=0, max_tokens=280, logprobs=2, ignore_eos=True)
        batch = llm.generate([CODE * 4, STORY[::-1][:120] + CODE], long)
        assert sum(o.preemptions for o in batch) > 0, f"{model} {codec}: nothing was preempted"
        return [digest(o) for o in (cold, hit, fork, *batch)]


def budget(model: str, codec: str) -> int:
    """Bytes of the frames that one sequence of MAX_LEN tokens needs."""
    from octavo.cache.footprint import plan
    from octavo.cache.format import Form
    from octavo.models.loading.load import load_model

    sizes = plan(load_model(model).spec.cache_spec(), 32, [Form(codec, codec)], 1 << 40)
    return sizes.frames_for([MAX_LEN]) * sizes.frame_bytes


def digest(output: RequestOutput) -> str:
    h = hashlib.sha256()
    for choice in output.outputs:
        h.update(struct.pack(f"<{len(choice.token_ids)}i", *choice.token_ids))
        for entry in choice.logprobs:
            h.update(struct.pack("<if", entry.token_id, entry.logprob))
            for token, logprob in entry.top:
                h.update(struct.pack("<if", token, logprob))
    return h.hexdigest()[:16]


def main(isas: list[str]) -> None:
    from octavo.ops._cpu import KERNEL_REVISION

    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if recorded.get("kernel_revision") != KERNEL_REVISION:
        recorded = {"kernel_revision": KERNEL_REVISION, "digests": {}}
    for isa in isas:
        for model in MODELS:
            for codec in CODECS:
                recorded["digests"][f"{isa} {model} {codec}"] = run(model, codec, isa)  # type: ignore[arg-type]
                print(isa, model, codec, recorded["digests"][f"{isa} {model} {codec}"])
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
