"""Prints one answer in the terminal as it comes: a bar while the prompt is read, the text, then a line of figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.engine.messages import Delta, Event, Finished, PromptProgress, Started


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finished: Finished | None


def print_answer(events: Iterator[Event], out: Console, err: Console) -> Answer:
    """Text goes to `out`, everything else to `err`. Ctrl-C ends the answer; what came so far is returned."""
    text: list[str] = []
    finished: Finished | None = None
    pending: Event | None = None
    bar = Progress(
        TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=err,
        transient=True,
    )  # fmt: skip
    task = bar.add_task("prompt", total=None)
    began = time.monotonic()
    first = last = began
    try:
        with bar:
            for event in events:
                if isinstance(event, Started):
                    bar.update(task, total=event.prompt_tokens, completed=event.cached_tokens)
                elif isinstance(event, PromptProgress):
                    bar.update(task, completed=event.done_tokens)
                else:
                    first = last = time.monotonic()
                    pending = event
                    break
        # Printed once the bar is gone, which would otherwise break the first line.
        if pending is not None:
            finished = _take(pending, text, out)
        for event in events:
            last = time.monotonic()
            finished = _take(event, text, out) or finished
    except KeyboardInterrupt:
        err.print("\n[dim]stopped[/]")
    out.print()
    if finished is not None:
        _print_figures(finished, last - first, err)
    return Answer("".join(text), finished)


def _take(event: Event, text: list[str], out: Console) -> Finished | None:
    if isinstance(event, Delta):
        text.append(event.text)
        out.out(event.text, end="", highlight=False)
        out.file.flush()
    return event if isinstance(event, Finished) else None


def _print_figures(done: Finished, decode_s: float, err: Console) -> None:
    rate = (done.completion_tokens - 1) / decode_s if decode_s > 0 and done.completion_tokens > 1 else None
    parts = [
        f"{done.prompt_tokens:,} prompt tokens ({done.cached_tokens:,} from the cache)",
        f"{done.completion_tokens:,} generated",
        f"first token after {done.first_token_s:.2f} s" if done.first_token_s is not None else "",
        f"{rate:.1f} tokens/s" if rate is not None else "",
        f"{done.kv_bytes / 2**20:.1f} MiB of KV cache",
    ]
    err.print(f"[dim]{'  ·  '.join(p for p in parts if p)}[/]", highlight=False, soft_wrap=True)
