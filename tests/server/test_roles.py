"""Who may call what: every route that there is, with every kind of key.

A route without a row here fails `test_every_route_has_a_row`: whoever adds one decides who may call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import BaseRoute, Route

from octavo.api.app import create_app
from octavo.api.auth import ApiKeys

from .conftest import SETTINGS
from .policies import ACME, ADMIN, OTHER, POLICY, bearer, policy_server
from .running import RunningServer, running_server
from .scripted import ScriptedEngine

FILE_KEY = "file-key-012"

#: Callers, in the order of the columns below.
KEYS: dict[str, dict[str, str]] = {
    "no key": {},
    "an unknown key": bearer("unknown-key-999"),
    "a tenant's key": bearer(ACME),
    "another tenant's key": bearer(OTHER),
    "a key of the key file": bearer(FILE_KEY),
    "an admin's key": bearer(ADMIN),
}

ANYBODY = (200, 200, 200, 200, 200, 200)
TENANTS = (401, 401, 200, 200, 200, 200)
ADMINS = (401, 401, 404, 404, 404, 200)


@dataclass(frozen=True)
class Row:
    """One method of one route: how to call it, and the status that each caller gets."""

    method: str
    route: str
    statuses: tuple[int, ...]
    body: Any = None
    path: str | None = None
    #: Where there is one tenant, "default", alone.
    alone: int = 200


CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
MESSAGES = {**CHAT, "max_tokens": 3}
COUNT = CHAT
TEXT = {"model": "scripted", "prompt": "hi"}

ROWS = [
    Row("GET", "/", ANYBODY),
    Row("HEAD", "/", ANYBODY),
    Row("GET", "/favicon.ico", ANYBODY),
    Row("HEAD", "/favicon.ico", ANYBODY),
    Row("GET", "/assets/{name}", ANYBODY, path="/assets/app.js"),
    Row("HEAD", "/assets/{name}", ANYBODY, path="/assets/app.js"),
    Row("GET", "/health", ANYBODY),
    Row("HEAD", "/health", ANYBODY),
    Row("POST", "/v1/chat/completions", TENANTS, CHAT),
    Row("POST", "/v1/completions", TENANTS, TEXT),
    Row("GET", "/v1/models", TENANTS),
    Row("GET", "/v1/models/{name:path}", TENANTS, path="/v1/models/scripted"),
    Row("POST", "/tokenize", TENANTS, {"prompt": "hi"}),
    Row("POST", "/detokenize", TENANTS, {"tokens": [104]}),
    Row("GET", "/v1/cache/policy", TENANTS),
    Row("POST", "/v1/messages", TENANTS, MESSAGES),
    Row("POST", "/v1/messages/count_tokens", TENANTS, COUNT),
    Row("GET", "/v1/cache/what-if", TENANTS),
    Row("POST", "/v1/cache/pins", TENANTS, {"model": "scripted", "prompt": "x" * 48}),
    Row("DELETE", "/v1/cache/pins/{pin_id}", (401, 401, 404, 404, 404, 404), path="/v1/cache/pins/x", alone=404),
    # Nobody has asked anything under this id.
    Row(
        "GET", "/v1/cache/receipts/{request_id}", (401, 401, 404, 404, 404, 404), path="/v1/cache/receipts/x", alone=404
    ),
    # One tenant's cache: its own, or an admin's to erase.
    Row(
        "DELETE", "/v1/tenants/{tenant}/cache", (401, 401, 200, 404, 404, 200), path="/v1/tenants/acme/cache", alone=404
    ),
    # These show all tenants' numbers.
    Row("GET", "/metrics", ADMINS),
    Row("GET", "/octavo/cache", ADMINS),
    Row("GET", "/octavo/cache/events", ADMINS),
]


def call(client: httpx.Client, row: Row, headers: dict[str, str]) -> httpx.Response:
    """The answer; of a stream that goes on, its head."""
    path = row.path or row.route
    with client.stream(row.method, path, json=row.body, headers=headers) as response:
        if "event-stream" not in response.headers.get("content-type", ""):
            response.read()
        return response


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    server = policy_server(ScriptedEngine(), path, POLICY, api_keys=ApiKeys([FILE_KEY]), max_watchers=100)
    with server as running, running.client() as client:
        yield client


@pytest.mark.parametrize(("caller", "headers"), KEYS.items(), ids=KEYS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.route}")
def test_with_a_policy(http: httpx.Client, row: Row, caller: str, headers: dict[str, str]) -> None:
    response = call(http, row, headers)
    assert response.status_code == row.statuses[list(KEYS).index(caller)]
    if response.status_code == 404 and row.statuses is ADMINS:
        # Told in the same words as of a route that does not exist.
        missing = http.request(row.method, "/no/such/route", headers=headers)
        told = missing.json()["error"]["message"].replace("/no/such/route", row.path or row.route)
        assert response.json()["error"] == {**missing.json()["error"], "message": told}


def leaves(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    """Routes, also those of routers that are included as a whole, as newer versions of FastAPI do."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        else:
            included = getattr(route, "original_router", None)
            assert included is not None, f"a kind of route that this test does not know: {route}"
            yield from leaves(included.routes)


def test_every_route_has_a_row() -> None:
    app = create_app(ScriptedEngine(), SETTINGS)
    found = {(method, route.path) for route in leaves(app.routes) for method in route.methods or ()}
    assert found == {(row.method, row.route) for row in ROWS}
    assert len(ROWS) == len(found)


@pytest.mark.parametrize("path", ["/metrics", "/octavo/cache", "/octavo/cache/events"])
def test_other_spellings_lead_nowhere(http: httpx.Client, path: str) -> None:
    for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
        assert http.request(method, path, headers=bearer(ACME)).status_code == 404
    for spelling in (path + "/", "/" + path, path.replace("/", "//"), path.upper(), path.replace("c", "%63"),
                     "/." + path, "/v1/.." + path, path + "%00", path + ";x", path + "?x=1"):  # fmt: skip
        # Sent as it stands: the client would tidy it up.
        request = httpx.Request("GET", http.base_url, headers=bearer(ACME))
        request.url = request.url.copy_with(raw_path=spelling.encode())
        assert http.send(request).status_code == 404, spelling
    control = httpx.Request("GET", http.base_url, headers=bearer(ADMIN))
    control.url = control.url.copy_with(raw_path=b"/metr%69cs?x=1")
    assert http.send(control).status_code == 200


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.route}")
@pytest.mark.parametrize("kind", ["open", "keyed", "open with a policy"])
def test_without_a_policy_or_without_keys(row: Row, kind: str, servers: dict[str, RunningServer]) -> None:
    with servers[kind].client() as client:
        known = bearer(FILE_KEY) if kind == "keyed" else {}
        assert call(client, row, known).status_code == row.alone
        if kind == "keyed":
            assert call(client, row, {}).status_code == (200 if row.statuses == ANYBODY else 401)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningServer]]:
    path: Path = tmp_path_factory.mktemp("policy") / "policy.toml"
    settings = replace(SETTINGS, max_watchers=100)
    keyed = replace(settings, api_keys=ApiKeys([FILE_KEY]))
    with (
        running_server(ScriptedEngine(), settings) as is_open,
        running_server(ScriptedEngine(), keyed) as has_keys,
        policy_server(ScriptedEngine(), path, "[tenants.default]\nrate = 1000", max_watchers=100) as has_policy,
    ):
        yield {"open": is_open, "keyed": has_keys, "open with a policy": has_policy}
