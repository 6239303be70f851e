"""A headless Chromium on the page of a running server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from octavo.api.settings import ServerSettings
from tests.server.running import RunningServer, running_server
from tests.server.scripted import ScriptedEngine

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

SETTINGS = ServerSettings(port=0, drain_s=0.3, watch_period_s=0.05, health_period_s=0.05)


def find_chromium() -> str:
    """OCTAVO_CHROMIUM, or what the system has. A missing browser is a failure, not a skip."""
    found = os.environ.get("OCTAVO_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.fail("no Chromium: apt-get install chromium, or set OCTAVO_CHROMIUM to one")
    return found


# Of this package alone: while it lives, playwright's event loop runs in this thread, and other tests want their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(max_model_len=4096)


@pytest.fixture
def server(engine: ScriptedEngine) -> Iterator[RunningServer]:
    with running_server(engine, SETTINGS) as running:
        yield running


class Visit:
    """A page and what went wrong on it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.troubles: list[str] = []
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("console", lambda m: self.troubles.append(m.text) if m.type in ("error", "warning") else None)

    def send(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def answered(self, n: int = 1) -> str:
        """The text of the n-th answer, once it is complete."""
        answer = self.page.locator(".message.assistant").nth(n - 1)
        answer.wait_for()
        self.page.locator("#stop").wait_for(state="hidden")
        return answer.locator(".text").inner_text()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    contexts = []

    def open_page(server: RunningServer, *, wait: bool = True, **options: object) -> Visit:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        made = Visit(context.new_page())
        made.page.goto(server.url + "/")
        if wait:
            made.page.wait_for_selector("#starters button:enabled")
        return made

    yield open_page
    for context in contexts:
        context.close()


def with_port(settings: ServerSettings, server: RunningServer) -> ServerSettings:
    """Settings that take the same port again."""
    return replace(settings, port=int(server.url.rsplit(":", 1)[1]))
