"""Hugging Face transformers behind the worker protocol: float32, weights dequantized from the same GGUF file.

Slow and large, and exact: no activation, key or value is rounded below float32. Imports nothing of Octavo.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.protocol import serve

#: Rows of logits turned into log-probabilities at a time.
ROWS = 256


class TransformersWorker:
    def load(self, model: str, threads: int) -> Mapping[str, Any]:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        path = Path(model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}

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
    serve({"load": worker.load, "nll": worker.nll, "greedy_along": worker.greedy_along})
