"""The page at /, as a visitor uses it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect

from octavo.api.auth import ApiKeys
from octavo.errors import OverloadedError
from tests.server.policies import ACME, policy_server
from tests.server.running import RunningServer, running_server
from tests.server.scripted import Script, ScriptedEngine

from .conftest import SETTINGS, Visit, with_port

Open = Callable[..., Visit]


def test_send_twice_and_watch_the_hit(server: RunningServer, engine: ScriptedEngine, visit: Open) -> None:
    engine.script = Script(reply="Eight leaves.\n\n  And 👋 <b>no</b> markup.")
    seen = visit(server)
    page = seen.page
    assert page.inner_text("#model") == "scripted"
    page.click("#starters button:nth-child(2)")
    assert seen.answered() == "Eight leaves.\n\n  And 👋 <b>no</b> markup."
    assert page.locator(".message b").count() == 0
    note = page.locator(".message.assistant .note")
    expect(note).to_contain_text("0 of 1,")
    expect(page.locator("#last-cached")).to_have_text("0")
    page.click(".again")
    expect(page.locator("#last-cached")).not_to_have_text("0")
    seen.answered()
    cached = int(page.inner_text("#last-cached").replace(",", ""))
    computed = int(page.inner_text("#last-computed").replace(",", ""))
    n_prompt = len(engine.requests[-1].prompt_token_ids)
    assert engine.requests[0].prompt_token_ids.tolist() == engine.requests[1].prompt_token_ids.tolist()
    assert cached == (n_prompt - 1) // 16 * 16
    assert cached + computed == n_prompt
    expect(note).to_contain_text(f"{cached:,} of {n_prompt:,} prompt tokens from the cache")
    assert page.locator(".message").count() == 2
    expect(page.locator("#announcer")).to_contain_text(f"{cached} prompt tokens from the cache")
    assert seen.troubles == []


def test_map_shows_pages(server: RunningServer, engine: ScriptedEngine, visit: Open) -> None:
    gate = threading.Semaphore(0)
    engine.script = Script(reply="abc", gate=gate)
    seen = visit(server)
    page = seen.page
    counts = {name: page.locator("#legend li", has_text=name).locator(".count") for name in ("open", "cached")}
    expect(counts["open"]).to_have_text("0")
    seen.send("x" * 100)
    expect(counts["open"]).to_have_text("1")
    expect(page.locator("#running")).to_have_text("1")
    gate.release(100)
    seen.answered()
    expect(counts["open"]).to_have_text("0")
    n_pages = len(engine.requests[0].prompt_token_ids) // 16
    expect(counts["cached"]).to_have_text(str(n_pages))
    label = f"0 open, 0 active, 0 shared, {n_pages} cached, {-n_pages % 4} free, 14 of 16 frames unused"
    expect(page.locator("#map")).to_have_attribute("aria-label", f"Map of the pages: {label}")
    # The first cell is painted in the colour of cached pages.
    painted = page.evaluate(
        "() => [...document.getElementById('map').getContext('2d').getImageData(2, 2, 1, 1).data].slice(0, 3)"
    )
    assert painted == [0x00, 0x9E, 0x73]
    page.hover("#map", position={"x": 3, "y": 3})
    expect(page.locator("#map-detail")).to_have_text("Frame 1 (int8 pages, full attention), page 1: cached")
    assert seen.troubles == []


def test_conversation_goes_on(server: RunningServer, engine: ScriptedEngine, visit: Open) -> None:
    seen = visit(server)
    page = seen.page
    page.click("#settings-button")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.3")
    page.fill("#max-tokens", "50")
    seen.send("one")
    seen.answered(1)
    seen.send("two")
    seen.answered(2)
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist(), skip_special=False)
    reply = engine.script.reply
    assert prompt == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        f"<|im_start|>assistant\n{reply}<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert engine.requests[-1].params.temperature == 0.3
    assert engine.requests[-1].params.max_tokens == 50
    page.click("#new-chat")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#empty")).to_be_visible()
    seen.send("three")
    seen.answered()
    assert b"one" not in bytes(t for t in engine.requests[-1].prompt_token_ids.tolist() if t < 256)
    assert seen.troubles == []


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop(server: RunningServer, engine: ScriptedEngine, visit: Open, how: str) -> None:
    engine.script = Script(reply="abcdef", gate=threading.Semaphore(3))
    seen = visit(server)
    page = seen.page
    seen.send("hi")
    expect(page.locator(".message.assistant .text")).to_have_text("abc")
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".message.assistant .note")).to_contain_text("stopped")
    engine.wait_until("idle")
    assert engine.cancelled == [engine.requests[0].request_id]
    # What was said so far belongs to the conversation.
    engine.script = Script()
    seen.send("on")
    seen.answered(2)
    assert b"assistant\nabc" in bytes(t for t in engine.requests[-1].prompt_token_ids.tolist() if t < 256)
    assert seen.troubles == []


def test_new_chat_while_an_answer_streams(server: RunningServer, engine: ScriptedEngine, visit: Open) -> None:
    engine.script = Script(reply="abcdef", gate=threading.Semaphore(3))
    seen = visit(server)
    seen.send("hi")
    expect(seen.page.locator(".message.assistant .text")).to_have_text("abc")
    seen.page.click("#new-chat")
    engine.wait_until("idle")
    engine.script = Script()
    seen.send("hello")
    assert seen.answered() == engine.script.reply
    assert b"abc" not in bytes(t for t in engine.requests[-1].prompt_token_ids.tolist() if t < 256)
    assert seen.page.locator(".message").count() == 2
    assert seen.troubles == []


def test_errors_are_shown(server: RunningServer, engine: ScriptedEngine, visit: Open) -> None:
    seen = visit(server)
    page = seen.page
    engine.script = Script(refuse=OverloadedError("8 requests wait, the limit is 8", retry_after_s=5))
    seen.send("hi")
    expect(page.locator(".message .error")).to_have_text("8 requests wait, the limit is 8")
    engine.script = Script(fail_after=3)
    seen.send("hi")
    expect(page.locator(".message .error").nth(1)).to_contain_text("the server failed")
    # The page goes on, without the question that was not answered but with what was said.
    engine.script = Script()
    seen.send("again")
    seen.answered(3)
    data = bytes(t for t in engine.requests[-1].prompt_token_ids.tolist() if t < 256)
    assert data.count(b"user\n") == 2


def test_key_is_asked_for(engine: ScriptedEngine, visit: Open) -> None:
    with running_server(engine, replace(SETTINGS, api_keys=ApiKeys(["the-right-key"]))) as server:
        seen = visit(server, wait=False)
        page = seen.page
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "a-wrong-key")
        page.press("#key", "Enter")
        expect(page.locator("#key-error")).to_have_text("That key is not known here.")
        page.keyboard.press("Escape")
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key", "the-right-key")
        page.press("#key", "Enter")
        expect(page.locator("#key-dialog")).to_be_hidden()
        expect(page.locator("#model")).to_have_text("scripted")
        seen.send("hi")
        assert seen.answered() == engine.script.reply
        assert "right-key" not in page.content()


def test_a_tenants_key_chats_without_the_view(engine: ScriptedEngine, visit: Open, tmp_path: Path) -> None:
    with policy_server(engine, tmp_path / "policy.toml") as server:
        seen = visit(server, wait=False)
        page = seen.page
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", ACME)
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("scripted")
        expect(page.locator("#map-detail")).to_contain_text("for admin keys")
        expect(page.locator("#banner")).to_be_hidden()
        seen.send("hi")
        assert seen.answered() == engine.script.reply
        assert engine.requests[-1].tenant == "acme"
        expect(page.locator("#last-computed")).not_to_have_text("–")


def test_server_restart(engine: ScriptedEngine, visit: Open) -> None:
    with running_server(engine, SETTINGS) as server:
        seen = visit(server)
        seen.send("hi")
        seen.answered()
    banner = seen.page.locator("#banner")
    expect(banner).to_be_visible()
    expect(banner).to_contain_text("trying again")
    seen.send("hello?")
    expect(seen.page.locator(".message .error")).to_be_visible()
    with running_server(ScriptedEngine(), with_port(SETTINGS, server)):
        expect(banner).to_be_hidden(timeout=15_000)
        seen.send("hi again")
        seen.page.locator(".message.assistant").nth(2).wait_for()
        assert seen.answered(3) == engine.script.reply


def test_prefill_progress(server: RunningServer, engine: ScriptedEngine, visit: Open) -> None:
    seen = visit(server)
    seen.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body=": prefill 512/4096\n\n" + "data: " + json.dumps({"choices": []}) + "\n\n",
        ),
    )
    seen.send("hi")
    # The stream ends without [DONE]: the page says so rather than take it for an answer.
    expect(seen.page.locator(".message .error")).to_have_text("the answer broke off")


def test_keyboard_alone(server: RunningServer, engine: ScriptedEngine, visit: Open) -> None:
    seen = visit(server)
    page = seen.page
    expect(page.locator("#input")).to_be_focused()
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    seen.answered()
    assert b"first line\nsecond line" in bytes(t for t in engine.requests[0].prompt_token_ids.tolist() if t < 256)
    expect(page.locator("#input")).to_be_focused()
    expect(page.locator("#input")).to_have_value("")
    # Every control can be reached, and each has a name.
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"skip", "new-chat", "settings-button", "input", "again"} <= reached
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('button, input, textarea')]"
        ".filter(e => !(e.textContent.trim() || e.labels?.length || e.ariaLabel)).map(e => e.id)"
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(server: RunningServer, visit: Open, scheme: str) -> None:
    """WCAG AA: text has 4.5 to 1 against what lies behind it, cells have 3 to 1 (free ones may be faint)."""
    page = visit(server, color_scheme=scheme).page
    colours = page.evaluate(
        "() => { const s = getComputedStyle(document.documentElement);"
        "return Object.fromEntries(['paper','sheet','ink','quiet','accent','on-accent','bubble','warn','warn-ink',"
        "'page-open','page-active','page-shared','page-cached'].map(n => [n, s.getPropertyValue('--' + n).trim()])); }"
    )
    for text, behind in [("ink", "paper"), ("ink", "sheet"), ("ink", "bubble"), ("quiet", "paper"), ("quiet", "sheet"),
                         ("on-accent", "accent"), ("warn-ink", "warn")]:  # fmt: skip
        assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
    for cell in ("page-open", "page-active", "page-shared", "page-cached", "accent"):
        assert contrast(colours[cell], colours["sheet"]) >= 3, cell


def contrast(one: str, two: str) -> float:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_phone(server: RunningServer, engine: ScriptedEngine, visit: Open) -> None:
    engine.script = Script(reply="word " * 200 + "x" * 500)
    seen = visit(server, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    page = seen.page
    expect(page.locator("#cache")).to_be_hidden()
    page.click("#starters button:nth-child(1)")
    seen.answered()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.click("#cache-button")
    expect(page.locator("#map")).to_be_visible()
    expect(page.locator("#cache-button")).to_have_attribute("aria-expanded", "true")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.click("#cache-button")
    expect(page.locator("#cache")).to_be_hidden()
    expect(page.locator("#input")).to_be_visible()
    assert seen.troubles == []


def test_nothing_comes_from_elsewhere(server: RunningServer, visit: Open) -> None:
    seen = visit(server, wait=False)
    asked: list[str] = []
    seen.page.on("request", lambda request: asked.append(request.url))
    seen.page.reload()
    seen.page.wait_for_selector("#starters button:enabled")
    assert len(asked) > 5
    assert all(url.startswith(server.url) for url in asked)
    # The policy holds: script that is not the server's own does not run.
    seen.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.ran = true';"
        "document.body.append(s); }"
    )
    assert seen.page.evaluate("window.ran") is None
