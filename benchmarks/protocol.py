"""A worker process per engine, driven by one JSON object a line over its standard input and output.

Engines are measured in processes of their own so that one's threads, allocator and imports cannot touch the other's
figures, and all are loaded at once so that runs can take turns. Standard library only: a worker may run under another
environment's Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Handler = Callable[..., Mapping[str, Any]]


class WorkerError(Exception):
    """A worker has died, or answered with an error; the message holds its traceback."""


class Worker:
    """The driving side. `module` is run with `python -m` under `python`, and imports only what it needs."""

    def __init__(
        self,
        name: str,
        python: str,
        module: str,
        environment: Mapping[str, str] | None = None,
        root: Path = ROOT,
    ) -> None:
        """`root`: the checkout whose module it is."""
        self.name = name
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            cwd=root,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Raises WorkerError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"{self.name} has died (exit status {self._process.wait()})") from None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.name} died in {command!r} (exit status {self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name} failed in {command!r}:\n{answer['error']}")
        return answer["result"]  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(handlers: Mapping[str, Handler]) -> None:
    """The worker's side: answer commands until the input ends."""
    # Libraries may print; only answers may reach the driving process.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": handlers[request["command"]](**request["arguments"])}
        except Exception:  # noqa: BLE001 - reported to the driving process, which stops
            answer = {"error": traceback.format_exc()}
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except BrokenPipeError:  # the driving process is gone, and nobody waits
            return
