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
    def greedy(self, tokens: list[int], n: int) -> Mapping[str, Any]:
        """n greedy tokens after `tokens`, each with the log-probabilities of the two likeliest."""
        steps, past, rows = [], None, torch.tensor([tokens])
        for _ in range(n):
            output = self._model(rows, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = output.past_key_values
            top = torch.log_softmax(output.logits[0, -1], dim=-1).topk(2)
            (best, second), (logprob, second_logprob) = top.indices.tolist(), top.values.tolist()
            steps.append([best, logprob, second, second_logprob])
            rows = torch.tensor([[best]])
        return {"steps": steps}


if __name__ == "__main__":
    worker = TransformersWorker()
    serve({"load": worker.load, "nll": worker.nll, "greedy": worker.greedy})
