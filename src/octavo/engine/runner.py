"""Runs one step: lays out the scheduled tokens and their pages as a batch, and takes it through the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.cache.manager import KVCache
from octavo.engine.decoder import Decoder
from octavo.engine.scheduler import ScheduledSequence
from octavo.ops.base import Batch, Ops

F32 = NDArray[np.float32]

#: Logits of prompt tokens are taken this many rows at a time, since vocab_size floats each add up.
PROMPT_LOGIT_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepHidden:
    """Hidden states of a step's rows, float32 [n, d_model], valid until the next step; and where sequences start."""

    hidden: F32
    row_start: NDArray[np.int32]


class Runner:
    """Owns the model and the backend; knows nothing of requests beyond their tokens."""

    def __init__(self, model: Decoder, ops: Ops, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        #: The backend's format id of each page class.
        self._format_ids = np.zeros(len(cache.classes), dtype=np.uint8)
        for page_class in cache.classes:
            if not page_class.is_open:
                self._format_ids[page_class.index] = ops.add_format(page_class.format)

    def run(self, step: list[ScheduledSequence]) -> StepHidden:
        """Compute the step's rows and write their keys and values. Raises CodecRangeError; pages are then undefined."""
        batch = self._batch(step)
        return StepHidden(self._model.forward(batch), batch.row_start)

    def last_logits(self, result: StepHidden, items: list[int]) -> F32:
        """float32 [len(items), vocab]: logits at the last row of the given items of the step."""
        return self._model.head(result.hidden, result.row_start[1:][items] - 1)

    def logits(self, result: StepHidden, first_row: int, n_rows: int) -> F32:
        """float32 [n_rows, vocab]: logits of a run of rows."""
        return self._model.head(result.hidden, np.arange(first_row, first_row + n_rows, dtype=np.int32))

    def _batch(self, step: list[ScheduledSequence]) -> Batch:
        arena = self._cache.arena
        n = len(step)
        tables = [item.sequence.table for item in step]
        row_start = np.zeros(n + 1, dtype=np.int32)
        np.cumsum([item.n_tokens for item in step], out=row_start[1:])
        position = np.array([table.num_computed_tokens for table in tables if table is not None], dtype=np.int32)
        tokens = [
            item.sequence.tokens.view()[start : start + item.n_tokens]
            for item, start in zip(step, position, strict=True)
        ]
        own = [table.groups[0] for table in tables if table is not None]
        entry_start = np.zeros(n + 1, dtype=np.int32)
        np.cumsum([len(group.entries) for group in own], out=entry_start[1:])
        handles = np.concatenate([group.entries.handles for group in own])
        classes = np.concatenate([group.entries.classes for group in own])
        opened = [-1 if group.open_page is None else arena.offsets[group.open_page] for group in own]
        return Batch(
            memory=arena.store.memory,  # type: ignore[attr-defined]
            tokens=np.concatenate(tokens),
            row_start=row_start,
            position=position,
            entry_start=entry_start,
            page_offset=arena.offsets[handles],
            page_format=self._format_ids[classes],
            open_offset=np.array(opened, dtype=np.int64),
        )
