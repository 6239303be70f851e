"""Hugging Face transformers behind the worker protocol: float32, weights dequantized from the same GGUF file.

Slow and large, and exact: no activation, key or value is rounded below float32. Imports nothing of Octavo.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.protocol import serve

#: Rows of logits turned into log-probabilities at a time.
ROWS = 256


#: Prompt tokens per call, as on the other sides.
CHUNK = 512


class TransformersWorker:
    def __init__(self) -> None:
        self._warpers = transformers.LogitsProcessorList()

    def load(self, model: str, threads: int, cache: str = "f32", n_ctx: int = 0) -> Mapping[str, Any]:
        """The cache grows as needed, in float32; other types are refused."""
        if cache != "f32":
            raise ValueError(f"this worker has a float32 cache, not {cache}")
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        path = Path(model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self._cache = transformers.DynamicCache(config=self._model.config)
        version = f"transformers {transformers.__version__}"
        return {"version": version, "system": f"torch {torch.__version__}", "n_ctx": n_ctx}

    @torch.inference_mode()
    def prefill(self, tokens: list[int], marks: list[int]) -> Mapping[str, Any]:
        """From an empty cache; seconds until each of `marks` tokens is in it. The last mark, which must be len(tokens),
        includes the choice of the next token."""
        self._tokens, self._warpers = tokens, transformers.LogitsProcessorList()
        self._cache = transformers.DynamicCache(config=self._model.config)
        seconds = {}
        start = time.perf_counter()
        for first in range(0, len(tokens), CHUNK):
            done = min(first + CHUNK, len(tokens))
            self._next(tokens[first:done])
            if done in marks:
                seconds[str(done)] = time.perf_counter() - start
        return {"seconds": seconds}

    @torch.inference_mode()
    def decode(self, context: int, n: int, temperature: float = 0.0, top_p: float = 1.0) -> Mapping[str, Any]:
        """Generate n tokens behind the first `context` tokens of the last prefill, which stay in the cache; greedily at
        temperature 0."""
        self._warpers = transformers.LogitsProcessorList(
            [transformers.TemperatureLogitsWarper(temperature), transformers.TopPLogitsWarper(top_p)]
            if temperature
            else []
        )
        self._cache.crop(context - 1 - self._cache.get_seq_length())  # a negative number: how many go
        token = self._next(self._tokens[context - 1 : context])
        seconds = []
        for _ in range(n):
            start = time.perf_counter()
            token = self._next([token])
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def _next(self, tokens: list[int]) -> int:
        ids = torch.tensor([tokens])
        logits = self._model(ids, past_key_values=self._cache, logits_to_keep=1).logits[:, -1]
        if not self._warpers:
            return int(logits.argmax())
        return int(torch.multinomial(torch.softmax(self._warpers(ids, logits), dim=-1), 1))

    @torch.inference_mode()
    def nll(self, tokens: list[int]) -> Mapping[str, Any]:
        """-log p of tokens[1:], each given all before it."""
        hidden = self._model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        targets = torch.tensor(tokens[1:])
        result: list[float] = []
        for row in range(0, len(targets), ROWS):
            logprobs = torch.log_softmax(self._model.lm_head(hidden[row : row + ROWS]), dim=-1)
            result.extend((-logprobs.gather(1, targets[row : row + ROWS, None])[:, 0]).tolist())
        return {"nll": result}

    @torch.inference_mode()
    def greedy_along(self, prompt: list[int], continuation: list[int]) -> Mapping[str, Any]:
        """What greedy decoding would choose at every token of a continuation, given those before it: the two likeliest
        tokens with their log-probabilities."""
        rows = torch.tensor([prompt + continuation[:-1]])
        logits = self._model(rows, logits_to_keep=len(continuation)).logits[0]
        top = torch.log_softmax(logits, dim=-1).topk(2)
        return {
            "steps": [
                [best, logprob, second, second_logprob]
                for (best, second), (logprob, second_logprob) in zip(
                    top.indices.tolist(), top.values.tolist(), strict=True
                )
            ]
        }


if __name__ == "__main__":
    worker = TransformersWorker()
    serve({
        "load": worker.load, "prefill": worker.prefill, "decode": worker.decode, "nll": worker.nll,
        "greedy_along": worker.greedy_along,
    })  # fmt: skip
