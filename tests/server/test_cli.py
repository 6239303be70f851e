"""`octavo serve` as a process: options, errors in one line, signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from .policies import digest

ROOT = Path(__file__).parents[2]


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), kept.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1", **extra}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.server.serve_scripted", *arguments]


@contextmanager
def serving(*arguments: str, **extra: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its address, and what it printed while starting."""
    process = subprocess.Popen(
        command("--port", "0", *arguments), stderr=subprocess.PIPE, text=True, env=environment(**extra)
    )
    assert process.stderr is not None
    printed = ""
    try:
        for line in process.stderr:
            printed += line
            if match := re.search(r"API +(http://\S+)/v1", line):
                yield process, match.group(1), printed
                return
        pytest.fail(f"it did not start: {printed}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def fails(*arguments: str, **extra: str) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(**extra), timeout=30)
    assert done.returncode == 2, done
    return done.stderr


def test_options_and_environment(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-for-tests\n")
    extra = {"OCTAVO_KV_CODEC": "f16", "OCTAVO_API_KEY_FILE": str(keys), "OCTAVO_MAX_MODEL_LEN": "100"}
    options = ("some-model", "--served-model-name", "mine", "--served-model-name", "also", "--v-codec", "int4")
    with serving(*options, **extra) as (_, url, printed):
        assert "mine" in printed
        assert "f16 keys, int4 values" in printed
        assert "up to 100 tokens" in printed
        assert url.startswith("http://127.0.0.1:")
        assert "warning" not in printed
        assert httpx.get(url + "/v1/models").status_code == 401
        models = httpx.get(url + "/v1/models", headers={"x-api-key": "a-key-for-tests"}).json()["data"]
        assert [model["id"] for model in models] == ["mine", "also"]


def test_open_address_without_keys_warns() -> None:
    with serving("--host", "0.0.0.0") as (_, url, printed):
        assert "warning" in printed
        assert "--api-key-file" in printed
        assert httpx.get(url + "/health").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kv-memory", "3x"), "not a size: '3x'"),
        (("--page-size", "33"), "page_size must be one of 16, 32, 64, 128, got 33"),
        (("--api-key-file", "/no/such/file"), "cannot read the API key file /no/such/file"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--port", "70000"), "--port"),
        (("--backend", "gpu"), "gpu"),
        (("--max-body", "10"), "1024"),
        (("--policy", "/no/such/file"), "cannot read the policy file /no/such/file"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], told: str) -> None:
    printed = fails(*arguments)
    assert told in printed
    assert "Traceback" not in printed


POLICY = f"""
[policy]
codec = "f16"
[tenants.acme]
keys = ["{digest("acme-key-123")}"]
"""


def asked(url: str, key: str) -> httpx.Response:
    return httpx.get(url + "/v1/cache/policy", headers={"x-api-key": key})


def test_policy_and_its_replacement(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    with serving("--host", "0.0.0.0", OCTAVO_POLICY=str(path)) as (process, url, printed):
        assert "(f16, " in printed
        assert "warning" not in printed
        assert asked(url, "acme-key-123").json()["policy"]["key_codec"] == "f16"
        assert asked(url, "other-key-456").status_code == 401
        path.write_text(POLICY + f'[tenants.other]\nkeys = ["{digest("other-key-456")}"]')
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: asked(url, "other-key-456").status_code == 200)
        # A file that says nothing sensible is logged with its line, and the server goes on.
        path.write_text(POLICY + "[tenants.other]\nkeys = []\nspeed = 9")
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        for line in process.stderr:
            if "stays as it was" in line:
                break
        assert f"{path}, line 8: there is no key 'speed' in [tenants.other]" in line
        assert asked(url, "other-key-456").json()["tenants"] == {"other": dict.fromkeys(NO_LIMITS)}
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


NO_LIMITS = ("floor", "cap", "session_cap", "rate")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing changed within 10 s"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        ("[policy]\ncodec = 4", (), "line 2: codec is a string, got 4"),
        (POLICY, ("--kv-codec", "int4"), "line 3: 'f16', but the server runs with 'int4' as its key_codec"),
        (POLICY, ("--v-codec", "int8"), "line 3: 'f16', but the server runs with 'int8' as its value_codec"),
        ('[pruning]\nmethod = "h2o"', (), "line 2: method in [pruning] cannot be kept"),
    ],
)
def test_bad_policies_are_one_line(tmp_path: Path, text: str, arguments: tuple[str, ...], told: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    printed = fails("--policy", str(path), *arguments)
    assert f"{path}, {told}" in printed
    assert "Traceback" not in printed
    assert "loading" not in printed


def test_flags_and_policy_may_agree(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    with serving("--policy", str(path), "--kv-codec", "f16") as (_, _, printed):
        assert "(f16, " in printed
    path.write_text(POLICY.replace("codec", "key_codec"))
    with serving("--policy", str(path), "--v-codec", "int4") as (_, _, printed):
        assert "f16 keys, int4 values" in printed


def test_sighup_without_a_policy_ends_the_process() -> None:
    """As of any process that does not say otherwise: a closed terminal does not leave a server behind."""
    with serving() as (process, _, _):
        process.send_signal(signal.SIGHUP)
        assert process.wait(10) == -signal.SIGHUP


def test_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        printed = fails("--port", str(port))
    assert f"port {port}" in printed
    assert "--port" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_an_idle_server(number: int) -> None:
    with serving() as (process, url, _):
        assert httpx.get(url + "/health").status_code == 200
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5


def test_signal_ends_a_stuck_stream() -> None:
    body = {"model": "smollm2-135m", "prompt": "hi", "stream": True}
    with serving(OCTAVO_TEST_STUCK="1") as (process, url, _), httpx.Client(base_url=url, timeout=30) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert "shutting_down" in response.read().decode()
        assert process.wait(10) == 0
        assert time.monotonic() - began < 10


def test_help_names_every_option() -> None:
    done = subprocess.run(command("--help"), capture_output=True, text=True, env=environment(), timeout=30)
    assert done.returncode == 0
    text = re.sub(r"[\s│]+", "", done.stdout)
    for name in ("host", "port", "threads", "kv-memory", "kv-codec", "k-codec", "v-codec", "page-size", "max-model-len",
                 "max-num-seqs", "step-tokens", "api-key-file", "served-model-name", "no-prefix-cache", "backend",
                 "isa", "open", "profile", "policy"):  # fmt: skip
        assert "--" + name in text
        assert "OCTAVO_" + name.upper().replace("-", "_") in text
