"""The policy in force: whose requests they are, what each caller sees of it, its rates, and its replacement."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from octavo.api.auth import ApiKeys, Caller, KeyRing
from octavo.api.contract import Contract
from octavo.api.errors import ApiError
from octavo.api.rates import RateLimits
from octavo.cache.policy import Policy, TenantPolicy
from octavo.cache.policy_file import parse_policy
from octavo.engine.client import EngineClient
from octavo.errors import ConfigError

from .conftest import SETTINGS
from .policies import ACME, ADMIN, OTHER, POLICY, bearer, digest, policy_server
from .running import RunningServer, running_server
from .scripted import Script, ScriptedEngine

PROMPT = "A prompt of more than one page, that is sixteen tokens. "
TEXT = {"model": "scripted", "prompt": PROMPT, "max_tokens": 1}
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.toml"


def test_the_key_names_the_tenant(scripted: ScriptedEngine, path: Path) -> None:
    keys = {ACME: "acme", OTHER: "globex", ADMIN: "admin", "file-key-012": "default"}
    with policy_server(scripted, path, api_keys=ApiKeys(["file-key-012"])) as server, server.client() as client:
        for key, tenant in keys.items():
            # What a client says of itself changes nothing.
            for body in ({}, {"cache_salt": "globex"}, {"tenant": "globex", "user": "globex"}):
                for route, asked in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
                    assert client.post(route, json={**asked, **body}, headers=bearer(key)).status_code == 200
                    assert scripted.requests[-1].tenant == tenant
                    salt = body.get("cache_salt")
                    assert scripted.requests[-1].cache_salt == ("" if salt is None else json.dumps([salt, None]))
            both = {"authorization": f"Bearer {key}", "x-api-key": OTHER}
            assert client.post("/v1/completions", json={**TEXT, "prompt": [[1, 2], [3]]}, headers=both).is_success
            assert [r.tenant for r in scripted.requests[-2:]] == [tenant, tenant]


def test_an_open_server_has_one_tenant(server: RunningServer, scripted: ScriptedEngine) -> None:
    with server.client() as client:
        assert client.post("/v1/completions", json=TEXT, headers=bearer("anything-at-all")).is_success
    assert scripted.requests[0].tenant == "default"


def test_tenants_share_no_pages(any_engine: EngineClient, path: Path) -> None:
    body = {**TEXT, "model": "m", "prompt": f"{path} " + PROMPT * 3}

    def cached(client: Any, key: str, salt: str | None = None) -> int:
        answer = client.post("/v1/completions", json={**body, "cache_salt": salt}, headers=bearer(key)).json()
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    info = any_engine.info
    text = (
        f'[policy]\nkey_codec = "{info.key_codec}"\nvalue_codec = "{info.value_codec}"'
        + POLICY.partition('codec = "int8"')[2]
    )
    with policy_server(any_engine, path, text, served_model_names=("m",)) as server, server.client() as client:
        assert cached(client, ACME) == 0
        own = cached(client, ACME)
        assert own >= 16
        assert cached(client, OTHER) == 0
        assert cached(client, ADMIN) == 0
        # A salt divides a tenant's pages; it opens nobody else's.
        assert cached(client, OTHER, "acme") == 0
        assert cached(client, ACME, "mine") == 0
        assert cached(client, ACME, "mine") == own
        assert cached(client, OTHER) == cached(client, ADMIN) == own


def test_every_key_is_compared() -> None:
    """Whichever key matches, the same comparisons are made."""
    policy = parse_policy(POLICY, "p")
    ring = KeyRing(ApiKeys(["file-key-012"]), policy)
    assert ring.find(ADMIN) == Caller("admin", "admin")
    assert ring.find(ACME) == Caller("acme", "tenant")
    assert ring.find("file-key-012") == Caller("default", "tenant")
    assert ring.find("unknown") is None
    assert "acme-key" not in repr(vars(ring))


# ---- GET /v1/cache/policy ----------------------------------------------------------------------------

GENERAL = {
    "policy": {"key_codec": "int8", "value_codec": "int8", "ladder": [], "at_cap": "reject", "session_cap": None},
    "lifetime": {"ttl_s": None, "max_age_s": None},
    "pruning": {"method": None, "budget": None},
    "prices": {"currency": "EUR", "cached": "0.015", "computed": "0.150", "output": "1"},
    "pools": {},
    "public": [],
}
NO_LIMITS = {"floor": None, "cap": None, "session_cap": None, "rate": None}


def view(server: RunningServer, key: str | None = None) -> dict[str, Any]:
    with server.client(headers=bearer(key) if key else {}) as client:
        response = client.get("/v1/cache/policy")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


def test_each_caller_sees_its_own_part(scripted: ScriptedEngine, path: Path) -> None:
    before = datetime.now(UTC).timestamp()
    with policy_server(scripted, path, api_keys=ApiKeys(["file-key-012"])) as server:
        seen = {name: view(server, key) for name, key in
                (("acme", ACME), ("globex", OTHER), ("default", "file-key-012"), ("admin", ADMIN))}  # fmt: skip
    for name, told in seen.items():
        assert before - 1 < datetime.fromisoformat(told.pop("loaded_at")).timestamp() < before + 60
        assert len(told.pop("version")) == 16
        own = {"acme": {**NO_LIMITS, "rate": 1000}, "globex": NO_LIMITS}
        expected = own if name == "admin" else {name: own.get(name, NO_LIMITS)}
        assert told == {**GENERAL, "tenants": expected}
        shown = json.dumps(told)
        for other in {"acme", "globex", "default"} - {name} if name != "admin" else ():
            assert other not in shown
        for key in (ACME, OTHER, ADMIN):
            assert digest(key)[7:15] not in shown


def test_the_default_policy(server: RunningServer) -> None:
    told = view(server)
    assert {k: told[k] for k in GENERAL} == {**GENERAL, "prices": None}
    assert told["tenants"] == {}
    assert told["version"] == view(server)["version"]


def test_a_version_tells_of_ones_own_changes_only(scripted: ScriptedEngine, path: Path) -> None:
    def versions() -> list[str]:
        return [view(server, key)["version"] for key in (ACME, OTHER, ADMIN)]

    with policy_server(scripted, path) as server:
        first = versions()
        reload(server, path, POLICY + "\n# nothing but a comment\n")
        second = versions()
        assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False]
        reload(server, path, POLICY.replace("rate = 1000", "rate = 999"))
        assert [a == b for a, b in zip(first, versions(), strict=True)] == [False, True, False]
        reload(server, path, POLICY.replace("0.015", "0.016"))
        assert not set(first) & set(versions())
        reload(server, path, POLICY)
        assert versions() == first


# ---- rates ----------------------------------------------------------------------------------------------


def test_token_bucket() -> None:
    now = 0.0
    limits = RateLimits(lambda: now)

    def taken(rate: int | None, tenant: str = "a") -> int:
        for n in range(10_000):
            try:
                limits.take(tenant, rate)
            except ApiError:
                return n
        return 10_000

    assert taken(60) == 60
    assert taken(60) == 0
    assert taken(60, "b") == 60
    now = 1.0
    assert taken(60) == 1
    now = 1.5
    assert taken(60) == 0
    now = 2.0
    assert taken(60) == 1
    now = 10_000.0
    assert taken(60) == 60
    # A limit that changes does so from the next request on.
    assert taken(6000) == 0
    now += 1
    assert taken(6000) == 100
    now += 60
    assert taken(10) == 10
    assert taken(None) == 10_000
    assert taken(10) == 10


@pytest.mark.parametrize(("rate", "wait_s"), [(1, 60), (7, 9), (60, 1), (1_000_000, 1)])
def test_waiting_as_long_as_told_is_enough(rate: int, wait_s: int) -> None:
    now = 100.0
    limits = RateLimits(lambda: now)
    for _ in range(rate):
        limits.take("acme", rate)
    with pytest.raises(ApiError) as caught:
        limits.take("acme", rate)
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": str(wait_s)})
    now += wait_s
    limits.take("acme", rate)


def test_rates_are_kept(scripted: ScriptedEngine, path: Path) -> None:
    text = POLICY.replace("rate = 1000", "rate = 3")
    with policy_server(scripted, path, text) as server, server.client() as client:
        acme, globex = bearer(ACME), bearer(OTHER)
        for _ in range(5):
            # Reading, and requests that nobody can be charged with, do not count.
            assert client.get("/v1/models", headers=acme).status_code == 200
            assert client.post("/v1/completions", json=TEXT, headers=bearer("unknown-key")).status_code == 401
        assert client.post("/v1/completions", json=TEXT, headers=acme).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT, headers=acme).status_code == 200
        assert client.post("/tokenize", json={"prompt": "a"}, headers=acme).status_code == 200
        for body in (TEXT, {**TEXT, "stream": True}):
            refused = client.post("/v1/completions", json=body, headers=acme)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 20
            error = refused.json()["error"]
            assert error == {
                "message": f"the limit of the tenant acme is 3 requests a minute, and 0 are left; "
                f"try again in {refused.headers['retry-after']} s",
                "type": "invalid_request_error",
                "param": None,
                "code": "rate_limit_exceeded",
            }
        assert client.get("/v1/cache/policy", headers=acme).json()["tenants"]["acme"]["rate"] == 3
        for _ in range(5):
            assert client.post("/v1/completions", json=TEXT, headers=globex).status_code == 200
        assert len(scripted.requests) == 7


def test_the_rate_of_an_open_server(scripted: ScriptedEngine, path: Path) -> None:
    with policy_server(scripted, path, "[tenants.default]\nrate = 1") as server, server.client() as client:
        statuses = [client.post("/v1/completions", json=TEXT).status_code for _ in range(3)]
    assert statuses == [200, 429, 429]


# ---- a new file --------------------------------------------------------------------------------------------


def reload(server: RunningServer, path: Path, text: str) -> bool:
    path.write_text(text)
    return server.server._contract.reload()


def status(server: RunningServer, key: str) -> int:
    with server.client(headers=bearer(key)) as client:
        return client.get("/v1/models").status_code


def test_keys_come_and_go_at_once(scripted: ScriptedEngine, path: Path) -> None:
    new = "new-key-012"
    with policy_server(scripted, path) as server:
        assert [status(server, key) for key in (ACME, OTHER, new)] == [200, 200, 401]
        assert reload(server, path, POLICY.replace(digest(ACME), digest(new)))
        assert [status(server, key) for key in (ACME, OTHER, new)] == [401, 200, 200]
        # A key that moves brings its new tenant with it.
        assert reload(server, path, POLICY.replace(digest(ACME), digest(OTHER), 1).replace(
            f'[tenants.globex]\nkeys = ["{digest(OTHER)}"]', "[tenants.globex]\nkeys = []"))  # fmt: skip
        assert list(view(server, OTHER)["tenants"]) == ["acme"]


BAD_FILES = [
    ("[policy", "line 1: this is not TOML"),
    (POLICY + "[admni]", "there is no table 'admni'; did you mean admin?"),
    (POLICY.replace("rate = 1000", 'session_cap = "10%"'), "line 13: session_cap in [tenants.acme] cannot be kept"),
    (POLICY.replace('"int8"', '"int4"'), "line 3: 'int4', but the server runs with 'int8' as its key_codec"),
    (POLICY + '\n[tenants.x]\nkeys = ["secret-key-in-plain"]', "64 hex digits"),
    ("[tenants.acme]\nkeys = []", "would open the server to everybody"),
    ("", "would open the server to everybody"),
]


@pytest.mark.parametrize(("text", "told"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_changes_nothing(
    scripted: ScriptedEngine, path: Path, text: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with policy_server(scripted, path) as server:
        before = view(server, ADMIN)
        assert not reload(server, path, text)
        assert view(server, ADMIN) == before
        assert [status(server, key) for key in (ACME, OTHER, ADMIN)] == [200, 200, 200]
        (record,) = [r for r in caplog.records if r.name == "octavo.policy"]
        assert record.levelno == logging.ERROR
        assert told in record.getMessage()
        assert str(path) in record.getMessage()
        assert "secret-key" not in caplog.text
        # A file that is put right is taken.
        assert reload(server, path, POLICY)


def test_a_missing_file_changes_nothing(scripted: ScriptedEngine, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with policy_server(scripted, path) as server:
        path.unlink()
        assert not server.server._contract.reload()
        assert "cannot read the policy file" in caplog.text
        assert status(server, ACME) == 200


def test_requests_in_flight_keep_their_tenant(scripted: ScriptedEngine, path: Path) -> None:
    gate = threading.Semaphore(0)
    scripted.script = Script(gate=gate)
    answers = []
    with policy_server(scripted, path) as server, server.client(headers=bearer(ACME)) as client:
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=TEXT)))
        asking.start()
        scripted.wait_until("running")
        assert reload(server, path, POLICY.replace(digest(ACME), digest("another-key")))
        assert status(server, ACME) == 401
        gate.release(100)
        asking.join(10)
    assert answers[0].status_code == 200
    assert scripted.requests[0].tenant == "acme"


def test_listeners_hear_of_what_is_in_force(path: Path) -> None:
    path.write_text(POLICY)
    contract = Contract(replace(SETTINGS, policy_file=path), ScriptedEngine().info)
    heard: list[Policy] = []

    def fails(_: Policy) -> None:
        raise RuntimeError("a listener that fails")

    contract.on_change(fails)
    contract.on_change(heard.append)
    path.write_text("[policy")
    assert not contract.reload()
    assert heard == []
    path.write_text(POLICY + "\n[tenants.third]\nkeys = []\nrate = 5")
    assert contract.reload()
    assert [p.tenant("third") for p in heard] == [TenantPolicy(rate=5)]
    assert heard == [contract.now.policy]


def test_a_bad_file_is_told_at_the_start(path: Path) -> None:
    path.write_text('[policy]\ncodec = "int4"')
    with pytest.raises(ConfigError, match="line 2: 'int4', but the server runs with 'int8'"):
        Contract(replace(SETTINGS, policy_file=path), ScriptedEngine().info)
    path.write_text(f'[tenants.x]\nkeys = ["{digest("file-key-012")}"]')
    settings = replace(SETTINGS, policy_file=path, api_keys=ApiKeys(["file-key-012"]))
    with pytest.raises(ConfigError, match="line 2: this key is listed already, in the API key file"):
        Contract(settings, ScriptedEngine().info)


def test_reloading_under_load(scripted: ScriptedEngine, path: Path) -> None:
    """No request sees half of a policy: a key that every version knows is never refused."""
    with policy_server(scripted, path) as server, server.client(headers=bearer(OTHER)) as client:
        stop = threading.Event()

        def change() -> None:
            contract = server.server._contract
            texts = (POLICY, POLICY.replace(digest(ACME), digest("another-key")), "[policy")
            for i in range(10_000):
                if stop.is_set():
                    return
                path.with_suffix(".new").write_text(texts[i % 3])
                path.with_suffix(".new").replace(path)
                contract.reload()

        changing = [threading.Thread(target=change) for _ in range(1)]
        for thread in changing:
            thread.start()
        deadline = time.monotonic() + 1
        seen = set()
        while time.monotonic() < deadline:
            told = client.get("/v1/cache/policy")
            assert told.status_code == 200
            seen.add(told.json()["loaded_at"])
        stop.set()
        for thread in changing:
            thread.join(10)
    assert len(seen) > 3


def test_without_a_policy_a_reload_changes_nothing(server: RunningServer) -> None:
    before = view(server)
    assert server.server._contract.path is None
    assert view(server) == before


def test_two_servers_have_their_own_policies(scripted: ScriptedEngine, path: Path, tmp_path: Path) -> None:
    with policy_server(scripted, path) as one, running_server(ScriptedEngine(), SETTINGS) as two:
        assert status(one, "unknown-key") == 401
        assert status(two, "unknown-key") == 200


def test_receipts_carry_a_price_and_are_the_tenants_own(tmp_path: Path) -> None:
    """Amounts are exact; another tenant's receipt answers as one that does not exist."""
    with policy_server(ScriptedEngine(), tmp_path / "policy.toml") as server, server.client() as http:
        body = {"model": "scripted", "prompt": "x" * 40, "max_tokens": 3}
        for _ in range(2):
            answer = http.post("/v1/completions", json=body, headers=bearer(ACME)).json()
        receipt = answer["cache"]
        hit, computed, output = receipt["hit_tokens"], receipt["computed_tokens"], answer["usage"]["completion_tokens"]
        assert hit == 32
        cost = receipt["cost"]
        assert cost["currency"] == "EUR"
        for name, tokens, price in (("cached", hit, "0.015"), ("computed", computed, "0.150"), ("output", output, "1")):
            assert Decimal(cost[name]) == tokens * Decimal(price) / 1_000_000
            assert "E" not in cost[name]
        path = f"/v1/cache/receipts/{answer['id']}"
        assert http.get(path, headers=bearer(ACME)).json()["receipts"][0]["cost"] == receipt["cost"]
        for key in (OTHER, ADMIN):
            other = http.get(path, headers=bearer(key))
            unknown = http.get("/v1/cache/receipts/none", headers=bearer(key))
            assert other.status_code == unknown.status_code == 404
            assert other.json()["error"]["code"] == unknown.json()["error"]["code"]
        erased = http.delete("/v1/tenants/acme/cache", headers=bearer(ACME)).json()
        assert erased["receipts"] == 2
        assert http.get(path, headers=bearer(ACME)).status_code == 404
        for tenant in ("globex", "no-such-tenant", "default"):
            refused = http.delete(f"/v1/tenants/{tenant}/cache", headers=bearer(ACME))
            assert refused.status_code == 404
            assert refused.json()["error"]["message"] == f"there is no tenant {tenant!r}"


def test_the_contract_reaches_the_engine(tmp_path: Path) -> None:
    """Lifetimes, floors and caps of the file hold in a real engine, also after a reload."""
    from octavo.config import EngineConfig
    from tests.support.tiny import tiny_engine

    engine = tiny_engine(EngineConfig(page_size=16))
    path = tmp_path / "policy.toml"
    text = POLICY.replace("rate = 1000", 'floor = "10%"\ncap = "50%"') + "\n[lifetime]\nttl_s = 60\n"
    with policy_server(engine, path, text) as server, server.client() as http:
        budget = engine.info.kv_memory_bytes
        quotas = engine._cache.quotas
        assert (quotas.floor("acme"), quotas.cap("acme"), quotas.cap("globex")) == (budget // 10, budget // 2, None)
        assert engine._cache.tree.lifetime.ttl_s == 60
        body = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 2}
        answer = http.post("/v1/completions", json=body, headers=bearer(ACME)).json()
        assert answer["cache"]["expires_at"] == pytest.approx(time.time() + 60, abs=10)
        path.write_text(text.replace("ttl_s = 60", "ttl_s = 7"))
        assert server.server._contract.reload()
        assert engine._cache.tree.lifetime.ttl_s == 7
        report = http.delete("/v1/tenants/acme/cache", headers=bearer(ADMIN)).json()
        assert report["pages"]["memory"] == 2
        path.write_text(text.replace('cap = "50%"', 'cap = "20KiB"').replace('floor = "10%"', 'floor = "1KiB"'))
        assert server.server._contract.reload()
        refused = http.post("/v1/completions", json={**body, "max_tokens": 900}, headers=bearer(ACME))
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "tenant_cap_exceeded"
        other = http.post("/v1/completions", json=body, headers=bearer(OTHER))
        assert other.status_code == 200
    engine.close()
