"""Runs the application under uvicorn: binds early, stops in bounded time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from octavo.api.app import create_app
from octavo.api.context import ServerContext
from octavo.api.generation import shutting_down
from octavo.api.settings import ServerSettings
from octavo.engine.client import EngineClient
from octavo.errors import ConfigError

log = logging.getLogger("octavo.api")

#: After the drain, streams get their error event and connections their end within this time.
_CLOSE_S = 3.0


def bind(settings: ServerSettings) -> socket.socket:
    """A bound socket, not yet listening. Raises ConfigError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot use the address {settings.host}: {error.strerror or error}") from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it. One whose client takes nothing is reset: else its answer would pile up here.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * settings.write_timeout_s))
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(settings, error) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a browser on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    engine: EngineClient,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain and return. `ready` is called once requests are accepted.

    Raises ConfigError when the port was taken in the meantime. The engine stays open.
    """
    server = OctavoServer(create_app(engine, settings), settings, ready=ready)
    try:
        server.run(sockets=[listener])
    except OSError as error:
        raise _cannot_listen(settings, error) from None


def _cannot_listen(settings: ServerSettings, error: OSError) -> ConfigError:
    message = f"cannot listen on {settings.host}, port {settings.port}: {error.strerror or error}"
    return ConfigError(f"{message}; choose another with --port, or 0 for any free one")


class OctavoServer(uvicorn.Server):
    """uvicorn with a shutdown that lets streams end, then ends them with an error that clients understand."""

    def __init__(self, app: FastAPI, settings: ServerSettings, *, ready: Callable[[], None] = lambda: None) -> None:
        context = app.state.context
        assert isinstance(context, ServerContext)
        self._generations = context.generations
        self._feed = context.feed
        self._contract = context.contract
        self._drain_s = settings.drain_s
        self._ready = ready
        # Its lines hold query strings; the application writes its own.
        logging.getLogger("uvicorn.access").disabled = True
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(settings.drain_s + _CLOSE_S),
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._generations.drain()
        self._feed.close()
        if len(self._generations):
            log.info("stopping; %d requests have %g s to end", len(self._generations), self._drain_s)
        deadline = asyncio.get_running_loop().call_later(
            self._drain_s, lambda: self._generations.fail_all(shutting_down())
        )
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()

    def reload_policy(self) -> None:
        """Read the policy file again, on a thread of its own; a bad one is logged, and the old policy stays."""
        threading.Thread(target=self._contract.reload, name="octavo-policy", daemon=True).start()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's, but the signals are not raised once more at the end: the caller has to close the engine."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        if self._contract.path is not None and hasattr(signal, "SIGHUP"):
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: self.reload_policy())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
