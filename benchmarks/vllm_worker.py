"""vLLM's CPU build behind the worker protocol: float32, continuous batching with prefix caching, step by step.

It reads a Hugging Face checkpoint of the same dequantized weights and is given token ids. Imports nothing of Octavo.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.protocol import serve

#: Prompt tokens per step, as on the other sides.
CHUNK = 512


class VllmWorker:
    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ids = itertools.count()

    def load(self, model: str, cache: str, threads: int, n_ctx: int) -> Mapping[str, Any]:
        """`model` is a checkpoint's directory; the cache is float32, as vLLM's CPU build has it for float32 models."""
        if cache != "f32":
            raise ValueError(f"this worker has a float32 cache, not {cache}")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        self._engine = LLMEngine.from_engine_args(EngineArgs(
            model=model, dtype="float32", enforce_eager=True, enable_prefix_caching=True, max_model_len=n_ctx,
            max_num_batched_tokens=CHUNK, max_num_seqs=16, skip_tokenizer_init=True, disable_log_stats=True,
        ))  # fmt: skip
        return {"version": f"vllm {vllm.__version__}", "system": "float32, eager", "n_ctx": n_ctx}

    def prefill(self, tokens: list[int], marks: list[int]) -> Mapping[str, Any]:
        """Without a prefix hit, which a first token of its own prevents; seconds until each of `marks` tokens is in the
        cache. The last mark, which must be len(tokens), includes the choice of the next token."""
        self._tokens = [1000 + next(self._ids), *tokens[1:]]
        request = self._add(self._tokens, 1)
        seconds, done = {}, 0
        start = time.perf_counter()
        while not self._step().get(request):
            done = min(done + CHUNK, len(tokens))
            if done in marks and done < len(tokens):
                seconds[str(done)] = time.perf_counter() - start
        seconds[str(len(tokens))] = time.perf_counter() - start
        self._finish()
        return {"seconds": seconds}

    def decode(self, context: int, n: int, temperature: float = 0.0, top_p: float = 1.0) -> Mapping[str, Any]:
        """Generate n tokens after the first `context` tokens of the last prefill, which are found in the prefix cache;
        greedily at temperature 0. A token's time is that between its step's end and the one before."""
        request = self._add(self._tokens[:context], n + 1, temperature, top_p)
        times: list[float] = []
        while len(times) < n + 1:
            times.extend([time.perf_counter()] * (self._step().get(request, 0) - len(times)))
        self._finish()
        return {"seconds": [b - a for a, b in pairwise(times)]}

    def together(self, prefix: list[int], tails: list[list[int]], n: int, warm: bool) -> Mapping[str, Any]:
        """Requests that arrive at once: prefix and a tail each, n tokens. Per request, seconds from the arrival of all
        until each of its tokens."""
        if warm:
            request = self._add([*prefix, 5], 1)
            while not self._step().get(request):
                pass
            self._finish()
        start = time.perf_counter()
        requests = {self._add(prefix + tail, n): i for i, tail in enumerate(tails)}
        times: list[list[float]] = [[] for _ in tails]
        while any(len(t) < n for t in times):
            counts = self._step()
            now = time.perf_counter() - start
            for request, count in counts.items():
                mine = times[requests[request]]
                mine.extend([now] * (count - len(mine)))
        self._finish()
        return {"times": times}

    def _add(self, tokens: list[int], n: int, temperature: float = 0.0, top_p: float = 1.0) -> str:
        name = str(next(self._ids))
        params = vllm.SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=n, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def _step(self) -> dict[str, int]:
        """Tokens that each request has after a step, for those that got any."""
        return {output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()}

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    worker = VllmWorker()
    serve({
        "load": worker.load, "prefill": worker.prefill, "decode": worker.decode, "together": worker.together,
    })  # fmt: skip
