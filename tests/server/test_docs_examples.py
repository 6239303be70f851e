"""The Python examples in README and docs run as they stand, against the real model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.engine.build import build_engine

from .conftest import SETTINGS
from .running import RunningServer, running_server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for i, match in enumerate(re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)):
            found.append((f"{page.name}-{i}", match.group(1)))
    return found


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RunningServer]:
    engine = build_engine(str(smollm2), EngineConfig(threads=2, kv_memory_bytes=64 << 20), "smollm2-135m")
    with running_server(engine, replace(SETTINGS, drain_s=5)) as running:
        yield running
    engine.close()


@pytest.mark.parametrize(("name", "source"), examples(), ids=[name for name, _ in examples()])
def test_example(name: str, source: str, server: RunningServer, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The catalog finds its models where the fixture found this one.
    monkeypatch.setenv("OCTAVO_MODELS", str(smollm2.parent))
    # The documented address is the default one; the test's server has a port of its own.
    exec(compile(source.replace("http://127.0.0.1:8000", server.url), name, "exec"), {})


def test_there_are_examples() -> None:
    assert len(examples()) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
