"""The dense decoder family: Llama, Mistral, SmolLM2, Qwen2, Qwen3.

They differ in dimensions and in which weights exist (biases, per-head norms), not in structure: one file serves
them all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.models.spec import ModelSpec, ModelWeights
from octavo.ops.base import Batch, Ops

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


class Decoder:
    """Blocks in order; how each is computed is the backend's matter."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: Ops, page_size: int) -> None:
        self._ops = ops
        self._embedding = ops.prepare_embedding(weights.embedding)
        self._layers = [
            (ops.prepare_attention(spec, i, layer.attention, page_size), ops.prepare_mlp(spec, layer.mlp))
            for i, layer in enumerate(weights.layers)
        ]
        self._head = ops.prepare_head(spec, weights.final_norm, weights.head)

    def forward(self, batch: Batch) -> F32:
        """-> float32 [n, d_model], the last layer's output; keys and values of all rows are in the batch's pages."""
        ops = self._ops
        hidden = ops.embed(self._embedding, batch.tokens)
        for attention, mlp in self._layers:
            ops.attention_block(attention, hidden, batch)
            ops.mlp_block(mlp, hidden)
        return hidden

    def head(self, hidden: F32, rows: I32) -> F32:
        """Logits of some rows: float32 [len(rows), vocab_size]."""
        return self._ops.head(self._head, hidden, rows)
