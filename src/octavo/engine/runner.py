"""Runs one step: lays out the scheduled tokens and their pages as a batch, and takes it through the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.cache.manager import KVCache
from octavo.engine.decoder import Decoder
from octavo.engine.scheduler import ScheduledSequence
from octavo.ops.base import Batch, GroupEntries, Ops

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
        self._format = ops.add_format(0, cache.footprint.sealed)

    def run(self, step: list[ScheduledSequence]) -> StepHidden:
        """Compute the step's rows and write their keys and values.

        Raises CodecRangeError. Sealed pages that were reserved for this step are then undefined; open pages are as they
        were before it, so that its sequences can be run again.
        """
        batch = self._batch(step)
        return StepHidden(self._model.forward(batch), batch.row_start)

    def last_logits(self, result: StepHidden, items: list[int]) -> F32:
        """float32 [len(items), vocab]: logits at the last row of the given items of the step."""
        return self._model.head(result.hidden, result.row_start[1:][items] - 1)

    def logits(self, result: StepHidden, first_row: int, n_rows: int) -> F32:
        """float32 [n_rows, vocab]: logits of a run of rows."""
        return self._model.head(result.hidden, np.arange(first_row, first_row + n_rows, dtype=np.int32))

    def _batch(self, step: list[ScheduledSequence]) -> Batch:
        cache = self._cache
        n = len(step)
        row_start = np.zeros(n + 1, dtype=np.int32)
        entry_start = np.zeros(n + 1, dtype=np.int32)
        position = np.empty(n, dtype=np.int32)
        open_offset = np.empty(n, dtype=np.int64)
        tokens, offsets = [], []
        for i, item in enumerate(step):
            table = item.sequence.table
            assert table is not None
            start = table.num_computed_tokens
            row_start[i + 1] = row_start[i] + item.n_tokens
            entry_start[i + 1] = entry_start[i] + len(table.pages)
            position[i] = start
            open_offset[i] = -1 if table.open_page is None else cache.offset(table.open_page)
            tokens.append(item.sequence.tokens.view()[start : start + item.n_tokens])
            offsets.append(cache.offsets(table.pages))
        page_offset = np.concatenate(offsets)
        # Tables hold every page from position 0 on.
        first_entry = np.repeat(entry_start[:-1], np.diff(entry_start))
        page_size = cache.footprint.page_size
        pages = GroupEntries(
            first_list=np.arange(n + 1, dtype=np.int32),
            entry_start=entry_start,
            page_offset=page_offset,
            page_format=np.full(len(page_offset), self._format, dtype=np.uint8),
            position=(np.arange(len(page_offset), dtype=np.int32) - first_entry) * np.int32(page_size),
            n_tokens=np.full(len(page_offset), page_size, dtype=np.int32),
            open_offset=open_offset,
        )
        return Batch(
            memory=cache.arena.memory,
            tokens=np.concatenate(tokens),
            row_start=row_start,
            position=position,
            groups=(pages,),
        )
