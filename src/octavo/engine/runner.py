"""Runs one step: lays out the scheduled tokens and their pages as a batch, and takes it through the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.cache.manager import KVCache
from octavo.cache.table import BlockTable, GroupTable
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
        #: The backend's format id of each page class.
        self._format_ids = np.zeros(len(cache.classes), dtype=np.uint8)
        for page_class in cache.classes:
            if not page_class.is_open:
                self._format_ids[page_class.index] = ops.add_format(page_class.group, page_class.format)

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
        tables = [_table_of(item) for item in step]
        row_start = np.zeros(len(step) + 1, dtype=np.int32)
        np.cumsum([item.n_tokens for item in step], out=row_start[1:])
        starts = [table.num_computed_tokens for table in tables]
        tokens = [item.sequence.tokens.view()[at : at + item.n_tokens] for item, at in zip(step, starts, strict=True)]
        return Batch(
            store=self._cache.arena.store,
            tokens=np.concatenate(tokens),
            row_start=row_start,
            position=np.array(starts, dtype=np.int32),
            groups=tuple(self._entries([table.groups[g] for table in tables]) for g in range(len(self._cache.groups))),
        )

    def _entries(self, tables: list[GroupTable]) -> GroupEntries:
        """One list for each sequence: all heads read the same pages."""
        offsets = self._cache.arena.offsets
        entry_start = np.zeros(len(tables) + 1, dtype=np.int32)
        np.cumsum([len(table.entries) for table in tables], out=entry_start[1:])
        return GroupEntries(
            first_list=np.arange(len(tables) + 1, dtype=np.int32),
            entry_start=entry_start,
            page_offset=offsets[np.concatenate([table.entries.handles for table in tables])],
            page_format=self._format_ids[np.concatenate([table.entries.classes for table in tables])],
            position=np.concatenate([table.entries.positions for table in tables]),
            n_tokens=np.concatenate([table.entries.n_tokens for table in tables]),
            open_offset=np.array(
                [-1 if table.open_page is None else offsets[table.open_page] for table in tables], dtype=np.int64
            ),
        )


def _table_of(item: ScheduledSequence) -> BlockTable:
    if item.sequence.table is None:
        raise ValueError("a scheduled sequence has no pages")
    return item.sequence.table
