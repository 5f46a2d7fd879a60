"""The playground in a real browser: ask, stream, switch the policy, compare, lose the server and get it back.

Needs Debian's chromium (apt-get install chromium) and skips without it, but not where CI is set.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import EchoScheduler, serve
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from ports import free_port
from server_process import ServerProcesses, read_line
from watched_scheduler import INFO, watched_scheduler

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
WITHOUT_CHROMIUM = not Path(CHROMIUM).exists() and not os.environ.get("CI")
pytestmark = pytest.mark.skipif(WITHOUT_CHROMIUM, reason="chromium is missing: apt-get install chromium")
PHONE = {"width": 360, "height": 740}
SETTLE = 15_000  # milliseconds that the page may take for what must come

# A server that can be killed.
PROGRAM = """
import asyncio, sys, time
from types import SimpleNamespace
sys.path.insert(0, {here!r})
import conftest
from byte_engine import ByteEngine
from watched_scheduler import INFO, watched_scheduler
from ecospec_orchestrator.server import Serving, bind
from ecospec_orchestrator.settings import load_settings
from ecospec_orchestrator.state.sharing import open_sharing


def build(settings):
    scheduler = watched_scheduler()
    sharing = open_sharing(settings, ByteEngine.geometry, scheduler.ledger.state)
    return SimpleNamespace(
        scheduler=scheduler, tokenizer=conftest.make_byte_tokenizer(), model_id="bytes", ledger=scheduler.ledger, info=INFO,
        store=sharing.store, close=lambda: (scheduler.stop(), sharing.close()),
    )


settings = load_settings(dict(arg.split("=", 1) for arg in sys.argv[1:]))
asyncio.run(Serving(settings, bind(settings.host, settings.port), build).run())
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    processes = ServerProcesses(tmp_path_factory.mktemp("server"), PROGRAM)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def url(byte_tokenizer: Any) -> Iterator[str]:
    with serve(byte_tokenizer, watched_scheduler()) as server:
        server.app.state.service.info = INFO
        yield server.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # A container's root has no user namespaces for the sandbox; the pages are our own.
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage", "--no-proxy-server"]
        )
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Any]:
    """Call it with an address and a viewport -> a page. Nothing may come from elsewhere, and nothing may fail in silence."""
    contexts, wrong = [], []

    def listen(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            wrong.append(message.text)

    def open_page(address: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        context.set_default_timeout(SETTLE)
        contexts.append(context)
        page = context.new_page()
        page.on("console", listen)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith((address, "data:")) or wrong.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong, wrong


def ready(page: Page) -> None:
    expect(page.locator("#server")).to_have_text("Ready", timeout=SETTLE)


def ask(page: Page, policy: str = "likelihood", against: str = "", tokens: int = 24, temperature: str = "0") -> None:
    ready(page)
    page.get_by_label("Policy", exact=True).select_option(policy)
    page.get_by_label("Compare with").select_option(against)
    page.get_by_label("Tokens at most").fill(str(tokens))
    page.get_by_label("Temperature").fill(temperature)
    page.get_by_role("button", name="Ask").click()


def done(page: Page, panel: int = 0) -> Any:
    found = page.locator(".panel").nth(panel)
    expect(found.locator(".state")).to_have_text("Done", timeout=SETTLE)
    return found


def test_an_answer_streams_and_every_step_can_be_looked_at(opened: Any, url: str) -> None:
    page = opened(url)
    ask(page, "likelihood", tokens=80)
    panel = page.locator(".panel")
    expect(panel.locator(".state")).to_have_text("Answering")
    page.wait_for_function("() => document.querySelectorAll('.answer .tok').length > 3")
    assert panel.locator(".state").inner_text() == "Answering", "the text came at once, not in a stream"
    done(page)
    tokens = panel.locator(".answer .tok")
    assert tokens.count() == 80 or "<|im_end|>" in panel.inner_text()
    assert panel.locator(".answer .tok.drafted").count() > 0 and panel.locator(".answer .tok.own").count() > 0
    shown = panel.locator(".figures dd").all_inner_texts()
    assert len(shown) == 4 and all(re.fullmatch(r"[\d.]+", figure) for figure in shown)
    assert float(shown[1]) > 1
    # The first step, by the slider; the tree agrees with its description.
    slider = panel.get_by_role("slider")
    slider.fill("0")
    expect(panel.locator(".where")).to_contain_text("Step 1 of")
    tree = panel.locator(".tree svg")
    told = re.search(r"(\d+) candidates?, (\d+) verified, (\d+) accepted", tree.get_attribute("aria-label") or "")
    assert told is not None
    drafted, verified, accepted = map(int, told.groups())
    assert drafted > verified >= accepted and verified == 4
    assert tree.locator(".box.accepted").count() == accepted
    assert tree.locator(".box.accepted, .box.rejected").count() == verified
    assert tree.locator(".box.accepted, .box.rejected, .box.candidate").count() == drafted
    assert tree.locator(".box.root").count() == 1 and tree.locator(".box.target").count() <= 1
    bars = panel.locator(".bars svg")
    assert bars.locator(".read").count() == bars.locator(".plain").count() == 3
    assert "Distinct experts per layer" in (bars.get_attribute("aria-label") or "")
    expect(panel.locator(".why")).to_contain_text("4 verified")
    panel.get_by_text("This step in numbers").click()
    expect(panel.locator("table").nth(0).locator("tbody tr")).to_have_count(drafted)
    expect(panel.locator("table").nth(1).locator("tbody tr")).to_have_count(3)
    # A token of the text leads to its step.
    tokens.last.click()
    expect(panel.locator(".answer .step").last).to_have_class("step selected")
    expect(panel.locator(".where")).not_to_contain_text("Step 1 of")


def test_the_policy_is_switched_and_two_runs_compared(opened: Any, url: str) -> None:
    page = opened(url)
    ask(page, "none")
    panel = done(page)
    expect(panel.locator(".why")).to_contain_text("plain decoding was asked for")
    assert panel.locator(".box.candidate").count() == 0
    assert panel.locator(".figures dd").nth(1).inner_text() == "1.00"
    for temperature in ("0", "1"):
        ask(page, "ecospec", "none", temperature=temperature)
        first, second = done(page, 0), done(page, 1)
        assert first.locator("h2").inner_text() == "EcoSpec (the paper)"
        assert first.locator(".answer").inner_text() == second.locator(".answer").inner_text()
        expect(page.locator("#comparison .verdict")).to_contain_text("Both texts are the same")
        rows = page.locator("#comparison tbody tr")
        assert rows.count() == 6 and "Tokens per second" in rows.first.inner_text()
    first.get_by_text("This step in numbers").click()
    assert "Predicted" in first.locator("table").last.inner_text()
    ask(page, "goodput")
    expect(done(page).locator(".why")).to_contain_text("The policy expected")
    expect(page.locator("#comparison")).to_be_hidden()


def test_an_answer_can_be_stopped(opened: Any, url: str) -> None:
    page = opened(url)
    ask(page, "none", tokens=1500)
    page.wait_for_function("() => document.querySelectorAll('.answer .tok').length > 3")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".panel .state")).to_have_text("Stopped")
    expect(page.locator(".answer")).to_contain_text("[stopped]")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()


def test_a_lost_server_is_told_and_found_again_without_a_reload(opened: Any, start: ServerProcesses) -> None:
    port = free_port()
    child, address = start(port=port)
    assert "ready" in read_line(child)
    page = opened(address)
    page.get_by_label("Prompt").fill("keep this")
    ask(page, "none", tokens=1500)
    page.wait_for_function("() => document.querySelectorAll('.answer .tok').length > 3")
    child.kill()
    child.wait()
    expect(page.locator("#server")).to_have_text("Lost: trying again")
    expect(page.get_by_role("alert")).to_contain_text("goes on trying")
    expect(page.locator(".panel .state")).to_have_text("Failed")
    expect(page.locator(".answer")).to_contain_text("[the server was lost here]")
    expect(page.get_by_role("button", name="Ask")).to_be_disabled()
    child, _ = start(port=port)
    assert "ready" in read_line(child)
    ready(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert page.get_by_label("Prompt").input_value() == "keep this"
    ask(page, "likelihood")
    done(page)
    # Lost while nobody asks: noticed by itself.
    child.kill()
    child.wait()
    expect(page.locator("#server")).to_have_text("Lost: trying again", timeout=SETTLE)


def test_a_server_with_keys_asks_for_one_and_one_without_steps_still_answers(opened: Any, byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, EchoScheduler(), api_keys="right") as server:
        page = opened(server.url)
        expect(page.locator("#server")).to_have_text("Needs a key")
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not one of this server's keys")
        key.fill("right")
        page.keyboard.press("Enter")
        ready(page)
        assert page.get_by_label("Policy", exact=True).is_disabled()
        page.get_by_role("button", name="Ask").click()
        expect(done(page).locator(".answer")).not_to_be_empty()
        expect(page.locator(".panel .detail")).to_be_hidden()
        assert "right" not in page.content() and page.evaluate("() => localStorage.length + sessionStorage.length") == 0


def test_a_refused_request_is_told(opened: Any, url: str) -> None:
    page = opened(url)
    ask(page, "none", tokens=4096)  # the context holds 2048
    expect(page.get_by_role("alert")).to_contain_text("the context holds at most")
    ask(page, "none", tokens=4)
    done(page)
    expect(page.get_by_role("alert")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(opened: Any, url: str, scheme: str) -> None:
    page = opened(url, viewport=PHONE, color_scheme=scheme, has_touch=True, is_mobile=True, reduced_motion="reduce")
    ask(page, "likelihood", "none")
    done(page, 1)
    page.locator(".panel").first.get_by_text("This step in numbers").click()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("() => document.getAnimations().length") == 0
    drawn = page.evaluate(
        "() => [...document.querySelectorAll('.panel svg')].map((e) => e.getBoundingClientRect().width)"
    )
    assert len(drawn) == 4 and max(drawn) <= PHONE["width"]
    small = page.evaluate(
        """() => [...document.querySelectorAll('button, select, input, summary')].filter((e) => e.offsetParent)
            .filter((e) => Math.min(e.offsetWidth, e.offsetHeight) < 22).map((e) => e.outerHTML)"""
    )
    assert not small


def test_with_the_keyboard_alone(opened: Any, url: str) -> None:
    page = opened(url)
    ready(page)
    focused = lambda: page.evaluate("() => document.activeElement.id || document.activeElement.className || ''")
    page.keyboard.press("Tab")
    assert focused() == "prompt"
    page.keyboard.press("Control+a")
    page.keyboard.type("typed")
    page.keyboard.press("Tab")
    assert focused() == "policy"
    page.keyboard.type("Likelihood")
    page.keyboard.press("Tab")
    assert focused() == "against"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Control+Enter")
    panel = done(page)
    assert panel.locator("h2").inner_text() == "Likelihood (EAGLE-3)"
    page.get_by_role("slider").focus()
    page.keyboard.press("Home")
    expect(panel.locator(".where")).to_contain_text("Step 1 of")
    page.keyboard.press("ArrowRight")
    expect(panel.locator(".where")).to_contain_text("Step 2 of")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(panel.locator(".where")).to_contain_text("Step 3 of")
    outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "one cannot see where the focus is"
    # On from there to the end, and nowhere stuck.
    stops = []
    while len(stops) < 12 and (not stops or stops[-1]):
        page.keyboard.press("Tab")
        stops.append(focused())
    assert stops == ["quiet follow", "", ""][: len(stops)] or stops[-1] == "", stops


CONTRAST = """() => {
  const parse = (colour) => { const c = colour.match(/[\\d.]+/g).map(Number); return c.length < 4 ? [...c, 1] : c; };
  const over = (top, under) => top.slice(0, 3).map((v, i) => v * top[3] + under[i] * (1 - top[3]));
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { const layers = []; for (let n = e; n; n = n.parentElement) layers.push(parse(getComputedStyle(n).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]); };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || e.closest('svg, .hidden-text, :disabled, noscript') || !e.offsetParent) continue;
    const behind = ground(e), front = over(parse(getComputedStyle(e).color), behind);
    const [a, b] = [light(front), light(behind)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push(`${e.className || e.tagName} ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
NAMELESS = """() => [...document.querySelectorAll('button, input, select, textarea, summary, [tabindex], svg[role], section, table')]
  .filter((e) => e.offsetParent || e instanceof SVGElement)
  .filter((e) => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim() || (e.labels && e.labels.length)))
  .map((e) => e.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_and_everything_has_a_name(opened: Any, url: str, scheme: str) -> None:
    page = opened(url, color_scheme=scheme)
    ask(page, "ecospec", "none")
    done(page, 1)
    page.locator(".panel").first.get_by_text("This step in numbers").click()
    expect(page.locator("#comparison")).to_be_visible()
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate("() => document.documentElement.lang") == "en" and page.title()
    levels = [
        int(tag[1])
        for tag in page.evaluate(
            "() => [...document.querySelectorAll('h1,h2,h3')].filter(e => e.offsetParent).map(e => e.tagName)"
        )
    ]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("main").count() == page.locator("header").count() == 1
    assert page.locator("#news").get_attribute("role") == "status"
    expect(page.locator("#news")).to_contain_text("tokens")
