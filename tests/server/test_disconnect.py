"""A client that goes away at any stage leaves nothing running; a server that stops leaves no client waiting."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import pytest

from octavo.api.settings import ServerSettings
from octavo.engine.client import EngineClient

from .running import RunningServer, running_server
from .scripted import Script, ScriptedEngine


def connect(server: RunningServer) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def post(connection: socket.socket, path: str, body: dict[str, object]) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)


BODIES = {
    "/v1/chat/completions": {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "n": 2},
    "/v1/completions": {"model": "scripted", "prompt": ["hi", "ho"]},
    "/v1/messages": {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_disconnect_cancels(
    server: RunningServer,
    scripted: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    path: str,
    stream: bool,
    stage: str,
) -> None:
    caplog.set_level(logging.INFO)
    if stage == "prefill":
        scripted.script = Script(prefill_gate=threading.Event())
    else:
        scripted.script = Script(gate=threading.Semaphore(4))
    with connect(server) as connection:
        post(connection, path, {**BODIES[path], "stream": stream})
        if stream and stage == "decode":
            while b"data: " not in connection.recv(65536):
                pass
        scripted.wait_until("running")
    scripted.wait_until("idle")
    assert set(scripted.cancelled) == {request.request_id for request in scripted.requests}
    deadline = time.monotonic() + 5
    while len(server.server._generations) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(server.server._generations) == 0
    assert "unexpected" not in caplog.text
    with server.client() as client:
        assert 'request_success_total{finished_reason="abort"' in client.get("/metrics").text


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot tell")
def test_a_client_that_stops_reading_is_cut_off(settings: ServerSettings) -> None:
    engine = ScriptedEngine(max_model_len=1_000_000)
    engine.script = Script(reply="x" * 100_000)  # 20 MB of events, far more than sockets hold
    with running_server(engine, replace(settings, write_timeout_s=1.0)) as server, connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        post(
            connection, "/v1/completions", {"model": "scripted", "prompt": "hi", "stream": True, "max_tokens": 100_000}
        )
        assert b"200 OK" in connection.recv(1024)
        engine.wait_until("running")
        deadline = time.monotonic() + 20
        while len(server.server._generations) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(server.server._generations) == 0
        with server.client() as client:
            assert client.get("/health").status_code == 200


def test_disconnect_in_the_body(server: RunningServer, scripted: ScriptedEngine) -> None:
    with connect(server) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        connection.sendall(head.encode() + b'{"model"')
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert scripted.requests == []


def test_slow_body_times_out(scripted: ScriptedEngine) -> None:
    from dataclasses import replace

    from .conftest import SETTINGS
    from .running import running_server

    with running_server(scripted, replace(SETTINGS, body_timeout_s=0.2)) as server, connect(server) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        connection.sendall(head.encode() + b'{"model"')
        answer = connection.recv(65536)
        assert b" 408 " in answer.split(b"\r\n")[0]


def test_silent_stream_is_kept_alive(server: RunningServer, scripted: ScriptedEngine) -> None:
    gate = threading.Event()
    scripted.script = Script(prefill_gate=gate)
    body = {**BODIES["/v1/completions"], "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == ": waiting"
        gate.set()
        assert any(line.startswith("data: ") for line in lines)


def test_progress_is_told_when_asked_for(server: RunningServer) -> None:
    body = {**BODIES["/v1/completions"], "stream": True}
    with server.client() as client:
        assert ": prefill" not in client.post("/v1/completions", json=body).text
        body["stream_options"] = {"include_progress": True}
        assert ": prefill 2/2" in client.post("/v1/completions", json=body).text


def test_shutdown_lets_answers_end(server: RunningServer, scripted: ScriptedEngine) -> None:
    gate = threading.Semaphore(2)
    scripted.script = Script(gate=gate)
    body = {"model": "scripted", "prompt": "hi", "max_tokens": 5, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.stop()
        gate.release(10)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    server.thread.join(10)
    assert not server.thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_ends_what_does_not_end(server: RunningServer, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.script = Script(gate=threading.Semaphore(2))
    answers: list[httpx.Response] = []

    def ask() -> None:
        with server.client() as client:
            body = {"model": "scripted", "prompt": "hi", "stream": stream}
            answers.append(client.post("/v1/completions", json=body))

    asking = threading.Thread(target=ask)
    asking.start()
    scripted.wait_until("running")
    began = time.monotonic()
    server.stop()
    server.thread.join(15)
    assert not server.thread.is_alive()
    assert time.monotonic() - began < 8
    asking.join(5)
    (answer,) = answers
    assert answer.status_code == (200 if stream else 503)
    assert "shutting_down" in answer.text
    scripted.wait_until("idle")


def test_draining_refuses_new_requests(server: RunningServer, scripted: ScriptedEngine) -> None:
    with server.client() as client:
        server.server._generations.drain()
        response = client.post("/v1/completions", json=BODIES["/v1/completions"])
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        assert int(response.headers["retry-after"]) > 0
        assert client.get("/health").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_pages_of_a_real_engine(
    any_server: RunningServer, any_engine: EngineClient, stream: bool
) -> None:
    body = {"model": "model", "prompt": f"{stream} " + "a long prompt " * 10, "max_tokens": 700, "ignore_eos": True}
    before = any_engine.stats()
    with connect(any_server) as connection:
        post(connection, "/v1/completions", {**body, "stream": stream})
        if stream:
            while b"data: " not in connection.recv(65536):
                pass
        else:
            while any_engine.stats().generation_tokens == before.generation_tokens:
                time.sleep(0.005)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        stats = any_engine.stats()
        if (
            stats.requests_running
            == stats.requests_waiting
            == stats.pages_active(is_open=True)
            == stats.pages_active(is_open=False)
            == 0
        ):
            break
        time.sleep(0.02)
    else:
        pytest.fail(f"something is still held: {stats}")
    if any_engine.info.backend != "scripted":  # whose answers are too short to be interrupted
        assert stats.generation_tokens - before.generation_tokens < 700
