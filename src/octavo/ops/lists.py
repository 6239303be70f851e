"""The rules for lists of entries (`octavo.ops.base.GroupEntries`), in plain Python, for backends without a checker."""

from __future__ import annotations

from itertools import pairwise

from octavo.cache.format import PageFormat
from octavo.ops.base import Batch, GroupEntries


def check_batch(batch: Batch, group: GroupEntries, formats: list[PageFormat], opened: PageFormat, n_lists: int) -> None:
    """Raises ValueError, naming segment, list and entry, for a batch that breaks a rule.

    n_lists: how many lists a segment has where each layer and KV head has its own.
    """
    size = opened.page_size
    written: list[tuple[int, int, int, bool]] = []  # begin, end, segment, whether it is an open page
    read: list[tuple[int, int]] = []
    for s in range(len(batch.position)):
        start = int(batch.position[s])
        stop = start + int(batch.row_start[s + 1] - batch.row_start[s])
        if start < 0 or stop <= start:
            raise ValueError(f"segment {s}: positions {start} to {stop - 1}")
        offset = int(group.open_offset[s])
        if start % size or stop % size or offset != -1:
            _check_place(f"segment {s}: open_offset", offset, opened.page_bytes, batch.store.n_bytes)
            written.append((offset, offset + opened.page_bytes, s, True))
        first, end = int(group.first_list[s]), int(group.first_list[s + 1])
        if end - first not in (1, n_lists):
            raise ValueError(f"segment {s}: has {end - first} lists of entries; there must be 1, or {n_lists}")
        for at in range(first, end):
            _check_list(batch, group, formats, s, at, range(start // size, stop // size), written, read)
    written.sort()
    for a, b in pairwise(written):
        if b[0] < a[1] and (a[2] != b[2] or a[0] != b[0] or a[3] or b[3]):
            raise ValueError(f"segments {a[2]} and {b[2]} would both write at byte {b[0]}")
    for begin, end in read:
        for w in written:
            if w[0] < end and begin < w[1]:
                raise ValueError(f"the page at byte {begin} is read, and written by segment {w[2]}")


def _check_list(
    batch: Batch,
    group: GroupEntries,
    formats: list[PageFormat],
    s: int,
    at: int,
    own: range,
    written: list[tuple[int, int, int, bool]],
    read: list[tuple[int, int]],
) -> None:
    size = formats[0].page_size
    first, end = int(group.entry_start[at]), int(group.entry_start[at + 1])
    free, completed = 0, 0
    for e in range(first, end):
        where = f"segment {s}, list {at - int(group.first_list[s])}, entry {e - first}"
        position, n_tokens = int(group.position[e]), int(group.n_tokens[e])
        if int(group.page_format[e]) >= len(formats):
            raise ValueError(f"{where} has page_format {int(group.page_format[e])}, but {len(formats)} are registered")
        page_bytes, offset = formats[int(group.page_format[e])].page_bytes, int(group.page_offset[e])
        _check_place(f"{where} has page_offset", offset, page_bytes, batch.store.n_bytes)
        if not 1 <= n_tokens <= size:
            raise ValueError(f"{where} has {n_tokens} tokens; a page holds 1 to {size}")
        if position < free:
            raise ValueError(f"{where} begins at position {position}, before position {free}")
        free = position + n_tokens
        if position < own.start * size:
            if free > own.start * size:
                raise ValueError(f"{where} reaches past the start of the segment's first own page, {own.start * size}")
            read.append((offset, offset + page_bytes))
        else:
            if completed >= len(own) or position != own[completed] * size or n_tokens != size:
                raise ValueError(f"{where} has {n_tokens} tokens from position {position} on, and completes no page")
            completed += 1
            written.append((offset, offset + page_bytes, s, False))
    if completed < len(own):
        missing = own[completed] * size
        raise ValueError(f"segment {s}, list {at - int(group.first_list[s])} lacks the page from position {missing} on")


def _check_place(what: str, offset: int, page_bytes: int, n_bytes: int) -> None:
    if offset < 0 or offset % 64 or offset + page_bytes > n_bytes:
        raise ValueError(f"{what} {offset}, no multiple of 64 with a whole page inside the arena's {n_bytes} bytes")
