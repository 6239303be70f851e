"""Tokenize and detokenize, metrics, the cache feed, and the page's files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.api.dashboard.feed import take_snapshot
from octavo.engine.client import EngineClient, FrameMap

from .conftest import SETTINGS
from .running import RunningServer, running_server
from .scripted import Script, ScriptedEngine

TEXT = {"model": "scripted", "prompt": "A prompt of more than one page, that is sixteen tokens. "}


def test_tokenize_and_back(server: RunningServer) -> None:
    with server.client() as client:
        text = "<|im_start|>né👋"
        told = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert told["tokens"] == [256, *"né👋".encode()]
        assert told["count"] == len(told["tokens"])
        assert told["max_model_len"] == 512
        assert told["token_strs"][:3] == ["<|im_start|>", "n", "bytes:\\xc3"]
        back = client.post("/detokenize", json={"model": "scripted", "tokens": told["tokens"]}).json()
        assert back == {"prompt": text}
        assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_tokenize_messages(server: RunningServer, scripted: ScriptedEngine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with server.client() as client:
        told = client.post("/tokenize", json={"messages": messages}).json()
        assert client.post("/v1/chat/completions", json={"model": "scripted", "messages": messages}).is_success
        assert told["tokens"] == scripted.requests[0].prompt_token_ids.tolist()
        without = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
        assert without["tokens"] == told["tokens"][: without["count"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [260]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {}),
    ],
)
def test_bad_token_requests(server: RunningServer, path: str, body: dict[str, object]) -> None:
    with server.client() as client:
        response = client.post(path, json=body)
        assert response.status_code == 400
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert client.post(path, json={**body, "model": "x", "prompt": "a", "tokens": [1]}).status_code in (400, 404)


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, the label that matters or "") -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = sample.labels.get("finished_reason") or sample.labels.get("state") or sample.labels.get("le") or ""
            found[(sample.name, label)] = sample.value
    return found


def test_metrics(server: RunningServer, scripted: ScriptedEngine) -> None:
    with server.client() as client:
        before = samples(client.get("/metrics").text)
        for _ in range(3):
            client.post("/v1/completions", json={**TEXT, "max_tokens": 5, "n": 2})
        scripted.script = Script(fail_after=1)
        client.post("/v1/completions", json=TEXT)
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    after = samples(response.text)

    def grown(name: str, label: str = "") -> float:
        return after[(name, label)] - before.get((name, label), 0)

    n = len(TEXT["prompt"])
    hits = n // 16 * 16 if n % 16 else n - 16
    assert grown("octavo:prompt_tokens_total") == 4 * n
    assert grown("octavo:prefix_cache_queries_total") == 4 * n
    assert grown("octavo:prefix_cache_hits_total") == 3 * hits
    assert grown("octavo:generation_tokens_total") == 30
    assert grown("octavo:request_success_total", "length") == 6
    assert grown("octavo:request_success_total", "error") == 1
    assert grown("octavo:request_success_total", "stop") == 0
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown(f"octavo:{name}_seconds_count") == 3, name
    # Per choice four gaps lie between five tokens; the request that failed had one token and no gap.
    assert grown("octavo:inter_token_latency_seconds_count") == 3 * 2 * 4
    assert grown("octavo:request_prompt_tokens_sum") == 4 * n
    assert grown("octavo:request_prefill_kv_computed_tokens_sum") == 4 * n - 3 * hits
    assert grown("octavo:request_generation_tokens_sum") == 30
    assert after[("octavo:num_requests_running", "")] == 0
    assert after[("octavo:num_preemptions_total", "")] == 0
    assert 0 < after[("octavo:kv_cache_usage_perc", "")] <= 1
    assert after[("octavo:kv_pages", "cached")] == n // 16
    assert 'model_name="scripted"' in response.text


def test_two_servers_have_their_own_metrics(server: RunningServer, scripted: ScriptedEngine) -> None:
    with running_server(ScriptedEngine(), SETTINGS) as other, other.client() as client:
        client.post("/v1/completions", json=TEXT)
        assert samples(client.get("/metrics").text)[("octavo:request_success_total", "length")] == 1
    with server.client() as client:
        assert samples(client.get("/metrics").text)[("octavo:request_success_total", "length")] == 0


def events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def test_cache_feed(server: RunningServer, scripted: ScriptedEngine) -> None:
    gate = threading.Semaphore(0)
    scripted.script = Script(gate=gate)
    with server.client() as client, client.stream("GET", "/octavo/cache/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        feed = events(response)
        first = next(feed)
        assert first["model"] == "scripted"
        assert first["frames"] == [16]
        assert first["stats"]["requests_running"] == 0
        asking = threading.Thread(target=lambda: httpx.post(server.url + "/v1/completions", json=TEXT, timeout=20))
        asking.start()
        assert next(s for s in feed if s["stats"]["requests_running"])["frames"] == [15, "Bofff"]
        gate.release(1000)
        last = next(s for s in feed if not s["stats"]["requests_running"] and s["stats"]["pages"][0]["cached"])
        assert last["frames"] == ["Acccf", 15]
        asking.join()
        assert client.get("/octavo/cache").json() == last
    # Nobody watches any more, so nobody looks.
    feed_task = server.server._feed
    for _ in range(200):
        if feed_task._looking.done():
            break
        threading.Event().wait(0.02)
    assert feed_task._looking.done()


def test_watchers_are_limited_and_leave(scripted: ScriptedEngine) -> None:
    with running_server(scripted, replace(SETTINGS, max_watchers=2)) as server, server.client() as client:
        for _ in range(2):
            with (
                client.stream("GET", "/octavo/cache/events") as one,
                client.stream("GET", "/octavo/cache/events") as two,
            ):
                # Kept, since a generator that is dropped closes its stream.
                first, second = events(one), events(two)
                assert next(first) == next(second)
                refused = client.get("/octavo/cache/events")
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "too_many_watchers"
            for _ in range(200):
                if server.server._feed._watchers == 0:
                    break
                threading.Event().wait(0.02)


def test_feed_ends_with_the_server(server: RunningServer) -> None:
    with server.client() as client, client.stream("GET", "/octavo/cache/events") as response:
        lines = response.iter_lines()
        next(lines)
        server.stop()
        assert list(lines) is not None
    server.thread.join(5)
    assert not server.thread.is_alive()


def test_feed_tells_of_a_failing_engine(server: RunningServer, scripted: ScriptedEngine) -> None:
    def fail() -> list[FrameMap]:
        raise RuntimeError("a secret")

    scripted.page_map = fail  # type: ignore[method-assign]
    with server.client() as client:
        told = client.get("/octavo/cache/events").text
        assert "internal_error" in told
        assert "secret" not in told
        assert client.get("/octavo/cache").status_code == 500


def test_snapshot_of_any_engine(any_engine: EngineClient) -> None:
    snapshot = take_snapshot(any_engine, "m")
    frames = sum(f if isinstance(f, int) else 1 for f in snapshot["frames"])
    assert frames == snapshot["stats"]["frames_total"]
    pages = "".join(f[1:] for f in snapshot["frames"] if isinstance(f, str))
    assert set(pages) <= set("foasc")
    assert pages.count("c") == sum(p["cached"] for p in snapshot["stats"]["pages"])


def test_page_files(server: RunningServer) -> None:
    with server.client() as client:
        page = client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css"), ("favicon.svg", "image/svg+xml")):
            response = client.get(f"/assets/{name}")
            assert response.headers["content-type"].startswith(kind)
            again = client.get(f"/assets/{name}", headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            # Nothing comes from elsewhere.
            assert "https://" not in response.text
        for name in ("nothing.js", "..%2fapp.py", "%2e%2e/feed.py", "__init__.py"):
            assert client.get(f"/assets/{name}").status_code == 404
        assert client.head("/").status_code == 200
