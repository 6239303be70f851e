"""Fixtures of the server's tests.

`any_engine` runs a test on the scripted engine and on a tiny random model; set OCTAVO_TEST_MODEL to a model (a catalog
name or a file) to run it on that one too. `scripted` is for what only a script can do: slow, failing, dying engines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import anthropic
import openai
import pytest

from octavo.api.settings import ServerSettings
from octavo.engine.client import EngineClient

from .running import RunningServer, running_server
from .scripted import ChatByteTokenizer, ScriptedEngine

SETTINGS = ServerSettings(port=0, drain_s=0.5, keepalive_s=1.0, watch_period_s=0.05, health_period_s=0.05)

ENGINES = ["scripted", "tiny", *(["model"] if os.environ.get("OCTAVO_TEST_MODEL") else [])]


@pytest.fixture
def settings() -> ServerSettings:
    return SETTINGS


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(scripted: ScriptedEngine, settings: ServerSettings) -> Iterator[RunningServer]:
    with running_server(scripted, settings) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as sdk:
        yield sdk


def openai_client(server: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=20)


def anthropic_client(server: RunningServer, key: str = "no-key") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=20)


@pytest.fixture
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client on the scripted engine; `any_claude`: on any."""
    with anthropic_client(server) as sdk:
        yield sdk


@pytest.fixture(scope="session", params=ENGINES)
def any_engine(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    engine = _build(request.param)
    yield engine
    engine.close()


@pytest.fixture
def any_server(any_engine: EngineClient) -> Iterator[RunningServer]:
    with running_server(any_engine, replace(SETTINGS, served_model_names=("model",))) as running:
        yield running


@pytest.fixture
def any_client(any_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai_client(any_server) as sdk:
        yield sdk


@pytest.fixture
def any_claude(any_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(any_server) as sdk:
        yield sdk


def _build(kind: str) -> EngineClient:
    if kind == "scripted":
        return ScriptedEngine(max_model_len=1024)
    from octavo.config import EngineConfig

    if kind == "model":
        from octavo.engine.build import build_engine

        return build_engine(os.environ["OCTAVO_TEST_MODEL"], EngineConfig(kv_memory_bytes=1 << 28))
    from tests.support.tiny import tiny_engine

    engine = tiny_engine(EngineConfig(backend="reference", page_size=16))
    engine.tokenizer = ChatByteTokenizer()
    return engine
