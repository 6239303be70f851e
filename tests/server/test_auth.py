"""Keys, other web sites, and what the log may hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from octavo.api.auth import ApiKeys, KeyRing
from octavo.errors import ConfigError

from .conftest import SETTINGS, openai_client
from .running import RunningServer, running_server
from .scripted import Script, ScriptedEngine

KEYS = ["first-key-123", "second-key-456"]
TEXT = {"model": "scripted", "prompt": "hi"}


@pytest.fixture
def keyed(scripted: ScriptedEngine) -> Iterator[RunningServer]:
    with running_server(scripted, replace(SETTINGS, api_keys=ApiKeys(KEYS))) as server:
        yield server


@pytest.mark.parametrize("key", KEYS)
def test_known_keys(keyed: RunningServer, key: str) -> None:
    with openai_client(keyed, key) as sdk:
        assert sdk.completions.create(**TEXT).choices
    with keyed.client(headers={"x-api-key": key}) as client:
        for path in ("/v1/models", "/metrics", "/octavo/cache"):
            assert client.get(path).status_code == 200
        assert client.post("/v1/completions", json=TEXT).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer first-key-12"},
        {"authorization": "Bearer first-key-1234"},
        {"authorization": "Basic first-key-123"},
        {"authorization": "first-key-123"},
        {"x-api-key": "wrong"},
        {"x-api-key": "# comment"},
    ],
)
def test_unknown_keys(keyed: RunningServer, scripted: ScriptedEngine, headers: dict[str, str]) -> None:
    with keyed.client(headers=headers) as client:
        for method, path in [
            ("GET", "/v1/models"),
            ("GET", "/v1/models/scripted"),
            ("GET", "/metrics"),
            ("GET", "/octavo/cache"),
            ("GET", "/octavo/cache/events"),
            ("GET", "/no/such/route"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
        ]:
            response = client.request(method, path, json=TEXT if method == "POST" else None)
            assert response.status_code == 401, path
            error = response.json()["error"]
            assert error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        # Liveness and the page's own files are open.
        for path in ("/health", "/", "/assets/app.js"):
            assert client.get(path).status_code == 200
    assert scripted.requests == []


def test_sdk_sees_an_authentication_error(keyed: RunningServer) -> None:
    with openai_client(keyed, "wrong") as sdk, pytest.raises(openai.AuthenticationError) as caught:
        sdk.models.list()
    assert caught.value.code == "invalid_api_key"


def test_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# production\n\n  first-key-123  \nsecond-key-456\n")
    keys = ApiKeys.from_file(path)
    assert keys
    ring = KeyRing(keys, None)
    assert ring
    assert all(ring.find(key) for key in KEYS)
    assert not any(ring.find(key) for key in ("", "# production", " first-key-123", "third-key-789", "\ud800"))
    assert not ApiKeys()
    assert not KeyRing(ApiKeys(), None)
    assert "first-key" not in repr(vars(keys))
    assert repr(keys) == "<2 API keys>"


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "no key"), (b"# only a comment\n", "no key"), (b"brief\n", "line 1"), (b"has a space\n", "line 1"),
     (b"good-key-123\nbad\n", "line 2"), (b"\xff\xfe", "UTF-8"), (None, "No such file")],
)  # fmt: skip
def test_bad_key_files(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        ApiKeys.from_file(path)
    assert "brief" not in str(caught.value).replace(str(path), "")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "{url}"}, 200),
        ({"origin": "{url}", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://localhost:9", "host": "localhost:9"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[::1"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        # A name that was rebound to this machine: origin and host agree, but the name is not ours.
        ({"origin": "http://evil.example", "host": "evil.example"}, 403),
    ],
)
def test_other_sites(server: RunningServer, scripted: ScriptedEngine, headers: dict[str, str], status: int) -> None:
    headers = {name: value.format(url=server.url) for name, value in headers.items()}
    with server.client() as client:
        response = client.post("/v1/completions", json=TEXT, headers=headers)
        assert response.status_code == status, response.text
        assert "access-control-allow-origin" not in response.headers
        assert client.options("/v1/completions", headers={"origin": "https://evil.example"}).status_code in (403, 405)
    assert len(scripted.requests) == (status == 200)


def test_with_keys_any_site_may_ask(keyed: RunningServer) -> None:
    headers = {"origin": "https://mine.example", "authorization": "Bearer first-key-123"}
    with keyed.client(headers=headers) as client:
        assert client.post("/v1/completions", json=TEXT).status_code == 200


SECRET = "xyzzy-the-secret-prompt"


def access_lines(caplog: pytest.LogCaptureFixture, n: int) -> list[str]:
    """The access log once it has n lines: a request's line is written after its answer."""
    deadline = time.monotonic() + 10
    while len(lines := [r.getMessage() for r in caplog.records if r.name == "octavo.access"]) < n:
        assert time.monotonic() < deadline, f"{len(lines)} lines after 10 s"
        time.sleep(0.01)
    return lines


def test_logs_hold_no_secrets(keyed: RunningServer, scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpcore").setLevel(logging.WARNING)
    headers = {"authorization": "Bearer first-key-123"}
    body = {**TEXT, "prompt": SECRET}
    with keyed.client(headers=headers) as client:
        assert client.post(f"/v1/completions?note={SECRET}", json=body).status_code == 200
        assert client.post("/v1/completions", json={**body, "temperature": SECRET}).status_code == 400
        assert client.post("/v1/completions", json={**body, "prompt": SECRET * 100}).status_code == 400
        assert client.post("/v1/completions", content=SECRET, headers={"content-type": SECRET}).status_code == 415
        scripted.script = Script(fail_after=2, error=RuntimeError(SECRET))
        assert client.post("/v1/completions", json=body).status_code == 500
        assert SECRET not in client.post("/v1/completions", json={**body, "stream": True}).text
        scripted.script = Script(refuse=ValueError(SECRET))
        assert client.post("/v1/completions", json=body).status_code == 500
        assert client.get("/v1/models", headers={"authorization": f"Bearer {SECRET}"}).status_code == 401
    access_lines(caplog, 8)
    assert SECRET not in caplog.text
    assert KEYS[0] not in caplog.text
    # The log is written, and would have shown it.
    assert "POST /v1/completions 200" in caplog.text
    assert "POST /v1/completions 500" in caplog.text
    assert "unexpected ValueError at" in caplog.text
    assert "scripted.py" in caplog.text
    logging.getLogger("octavo.api").warning("control %s", SECRET)
    assert SECRET in caplog.text


def test_log_lines_cannot_be_forged(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo.access")
    with server.client() as client:
        client.get("/v1/models/%0aPOST%20/forged" + "x" * 500)
    (line,) = access_lines(caplog, 1)
    assert "\n" not in line
    assert len(line) < 250


def test_request_ids_and_headers(server: RunningServer) -> None:
    with server.client() as client:
        responses: list[httpx.Response] = [client.get("/health"), client.get("/nothing"), client.post("/tokenize")]
    assert len({r.headers["x-request-id"] for r in responses}) == 3
    assert all(r.headers["x-content-type-options"] == "nosniff" for r in responses)
    assert all("server" not in r.headers for r in responses)
