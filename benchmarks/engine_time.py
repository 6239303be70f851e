"""How much of an engine step is spent inside C++ and how much around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType, TracebackType
from typing import Any

from octavo.engine.engine import Engine


class EngineClock:
    """While entered, times every call into the compiled module and every step of an idle engine.

    Every function and method of `octavo.ops._cpu` is wrapped. The wrappers cost well under a microsecond each and count
    as Python, so its share is overstated rather than understated.

    Attributes:
        steps: (seconds of the step, seconds of it inside compiled code), one per step since it was entered. A step is
            all that the engine does between looking for messages: scheduling, running, sampling, emitting.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inside = 0.0
        self._undo = ExitStack()
        self.steps: list[tuple[float, float]] = []

    def __enter__(self) -> EngineClock:
        from octavo.ops import _cpu, cpu

        wrapped: dict[int, Callable[..., Any]] = {}
        for name, value in list(vars(_cpu).items()):
            if isinstance(value, type):
                for method, function in list(vars(value).items()):
                    if callable(function) and not method.startswith("_"):
                        self._replace(value, method, self._timed(function))
            elif callable(value) and not name.startswith("_"):
                wrapped[id(value)] = self._timed(value)
                self._replace(_cpu, name, wrapped[id(value)])
        for name, value in list(vars(cpu).items()):
            if id(value) in wrapped:
                self._replace(cpu, name, wrapped[id(value)])
        step = self._engine._step

        def timed_step() -> None:
            self._inside, start = 0.0, time.perf_counter()
            step()
            self.steps.append((time.perf_counter() - start, self._inside))

        self._engine._step = timed_step  # type: ignore[method-assign]
        self._undo.callback(self._engine.__dict__.pop, "_step")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside += clock() - start

        return call

    def _replace(self, owner: type | ModuleType, name: str, value: Callable[..., Any]) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
