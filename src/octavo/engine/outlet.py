"""A request's way out of the engine: its sink, made harmless."""

from __future__ import annotations

import logging
import traceback

from octavo.engine.messages import Event, Failed, Finished, Sink

log = logging.getLogger("octavo.engine")


class Outlet:
    """Calls a sink; raises nothing. A sink that has raised hears only of the request's failure after that, also where
    the request had just come to its end.

    `error` is what it raised first, for whoever fails the request.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.error: Exception | None = None

    def __call__(self, event: Event) -> None:
        if self.error is not None:
            if isinstance(event, Finished):
                event = Failed(event.request_id, self.error)
            elif not isinstance(event, Failed):
                return
        try:
            self._sink(event)
        except BaseException as error:  # noqa: BLE001 - the sink's fault, not the engine's, whatever it is
            log_fault(f"the sink of request {event.request_id} raised", error)
            told = error if isinstance(error, Exception) else RuntimeError(f"the sink raised {type(error).__name__}")
            self.error = self.error or without_frames(told)
            if isinstance(event, Finished):
                self(event)


def log_fault(what: str, error: BaseException) -> None:
    """Where it happened, but not the message, which may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: %s\n%s", what, type(error).__name__, frames)


def without_frames(error: Exception) -> Exception:
    """The error without tracebacks, its own and those of what caused it.

    The frames of a step hold the arena and the weights; whoever keeps the error would keep those.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]
    return error
