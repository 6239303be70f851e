"""How a fetch tells how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Report(Protocol):
    """Called with what is being done, and how many of how many bytes are done."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def silent(what: str, done: int, total: int) -> None:
    """Reports nothing."""


@contextmanager
def progress_bars(console: Console) -> Iterator[Report]:
    """A bar per step. On something that is no terminal, one line per step instead."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=min(done, total))

        yield report


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console, self._last = console, ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._last:
            self._last = what
            self._console.print(f"{what} ({total / 1e6:.0f} MB)", highlight=False)
