"""A real server on a free port, in a thread of the test process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from octavo.api.app import create_app
from octavo.api.server import OctavoServer, bind, url_of
from octavo.api.settings import ServerSettings
from octavo.engine.client import EngineClient


@dataclass(frozen=True)
class RunningServer:
    url: str
    engine: EngineClient
    server: OctavoServer
    thread: threading.Thread

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)  # type: ignore[arg-type]

    def stop(self) -> None:
        self.server.should_exit = True


@contextmanager
def running_server(engine: EngineClient, settings: ServerSettings) -> Iterator[RunningServer]:
    listener = bind(settings)
    started = threading.Event()
    server = OctavoServer(create_app(engine, settings), settings, ready=started.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    url = url_of(listener)
    thread.start()
    assert started.wait(20), "the server did not start"
    try:
        yield RunningServer(url, engine, server, thread)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
