"""The page in a real browser: chat, stop, tool calls, key, dashboard."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from client import TridentClient
from client.gateway.security.tenants import read_tenants
from client.gateway.settings import GatewaySettings
from engine.launch.server import TritonServer
from tests.server.gateway.running import running
from tests.server.gateway.tools import CALL, TOOLS, written

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]

# Where Chromium runs as root, as in a container, it has no sandbox.
_ARGUMENTS = ["--no-sandbox"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, gateway: str) -> Iterator[Page]:
    """The page, on which no error happens and which asks nobody but the gateway."""
    page = browser.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text))  # a breach of the policy, say
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    page.goto(f"http://{gateway}/")
    expect(page.locator("#state")).to_have_text("ready")
    yield page
    page.close()
    assert not [fault for fault in faults if "server responded with a status of 400" not in fault]
    assert all(url.startswith(f"http://{gateway}/") for url in asked)


def say(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    expect(page.locator("#send")).to_be_enabled()  # an answer has its last token before its end
    page.keyboard.press("Enter")


def set_parameters(page: Page, **values: str) -> None:
    page.locator("#parameters > summary").click()
    for name, value in values.items():
        page.fill(f"#parameters [name={name}]", value)


def change_requests(page: Page, **fields: Any) -> None:
    """Send fields that the page has none for."""

    def send(route: Route) -> None:
        body = {**route.request.post_data_json, **fields}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", send)


def slow_down(page: Page) -> None:
    """Give the page a line so slow that an answer of hundreds of tokens lasts for many seconds."""
    line = {"offline": False, "latency": 0, "downloadThroughput": 5_000, "uploadThroughput": -1}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", line)


def test_answers_a_chat_with_the_parameters(page: Page, server: TritonServer) -> None:
    set_parameters(page, temperature="0", max_completion_tokens="60", system="Be short.")
    history: list[Any] = [{"role": "system", "content": "Be short."}]
    with TridentClient(server.grpc_url) as client:
        for index, text in enumerate(("One two", "three")):
            say(page, text)
            history.append({"role": "user", "content": text})
            expected = client.generate(messages=history, temperature=0, max_tokens=60)
            history.append({"role": "assistant", "content": expected.text})
            article = page.locator("article.assistant").nth(index)
            figures = article.locator(".figures")
            expect(figures).to_have_text(
                re.compile(
                    r"first token after \d+ ms, ([\d.]+ tokens/s, )?"  # none if all came at once
                    rf"{expected.num_input_tokens} \+ {expected.num_output_tokens} tokens"
                )
            )
            assert article.locator(".text").last.text_content() == expected.text
    page.click("#clear")
    expect(page.locator("article")).to_have_count(0)


def test_answers_before_the_models_are_listed(browser: Browser, gateway: str) -> None:
    with closing(browser.new_page()) as page:
        page.route("**/v1/models", lambda _: None)  # no answer
        page.goto(f"http://{gateway}/")
        set_parameters(page, max_completion_tokens="2")
        say(page, "Hello")
        expect(page.locator(".figures")).to_contain_text("+ 2 tokens")


def test_escape_stops_an_answer(page: Page) -> None:
    change_requests(page, ignore_eos=True)
    slow_down(page)
    say(page, "Tell me everything")
    expect(page.locator(".figures")).to_contain_text("first token after")
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_contain_text("stopped")
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#send")).to_be_enabled()


def test_shows_the_servers_errors_and_goes_on(page: Page) -> None:
    set_parameters(page, tools="[{")
    say(page, "Hello")
    expect(page.locator(".error")).to_contain_text("Tools: not valid JSON")
    page.fill("[name=tools]", "")
    page.fill("[name=max_completion_tokens]", "100000000")
    say(page, "Hello")
    expect(page.locator(".error").last).to_contain_text("max_completion_tokens")
    page.fill("[name=max_completion_tokens]", "2")
    say(page, "Hello")
    expect(page.locator(".figures").last).to_contain_text("+ 2 tokens")


def test_shows_calls_of_tools_and_sends_their_results(
    browser: Browser, tool_gateway: str, tool_tokenizer: Any
) -> None:
    with closing(browser.new_page()) as page:
        page.goto(f"http://{tool_gateway}/")
        set_parameters(page, max_completion_tokens="80", tools=json.dumps(TOOLS))
        no_thoughts = {str(tool_tokenizer.convert_tokens_to_ids("<think>")): -100}
        call = written(f"<tool_call>\n{CALL}\n</tool_call>")
        change_requests(page, structured_outputs=call, logit_bias=no_thoughts)
        say(page, "Rain?")
        shown = page.locator("article.assistant details.call")
        expect(shown.locator("summary")).to_have_text("Call of get_weather")
        expect(shown.locator("pre")).to_have_text('{"city": "Zürich", "dry": true}')
        page.get_by_label("Result of get_weather").fill("dry")
        page.keyboard.press("Enter")
        expect(page.locator("article.tool pre")).to_have_text("dry")
        expect(shown).to_have_count(2)


def test_works_by_keyboard(page: Page) -> None:
    page.focus("#chat-tab")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#dashboard")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#dashboard-tab")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#chat")).to_be_visible()


def test_asks_for_the_key(browser: Browser, server: TritonServer) -> None:
    settings = GatewaySettings(
        triton_urls=(server.grpc_url,), tenants=read_tenants(("a-key",), None)
    )
    with running(settings) as address, closing(browser.new_page()) as page:
        page.goto(f"http://{address}/")
        for key in ("wrong", "a-key"):
            expect(page.locator("#key-dialog")).to_be_visible()
            page.fill("#key", key)
            page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_value("ensemble")
        say(page, "Hello")
        expect(page.locator(".figures")).to_contain_text("first token after")


def test_the_dashboard_shows_the_servers_metrics(page: Page, server: TritonServer) -> None:
    page.click("#dashboard-tab")
    tiles = page.locator(".tile output")
    expect(tiles.first).to_have_text("0")
    with TridentClient(server.grpc_url) as client:
        client.generate("One two three", max_tokens=64, ignore_eos=True)
    expect(page.locator("#latency tbody tr").first).to_contain_text("ms")
    expect(tiles).to_have_count(6)


def test_quantiles_are_interpolated(page: Page) -> None:
    found = page.evaluate(
        """async () => {
            const { parse, quantile } = await import("/page/prometheus.js");
            const text = (a, b, c) => `# TYPE x counter
x_bucket{m="1",le="1"} ${a}
x_bucket{m="2",le="1"} 0
x_bucket{m="1",le="2.5"} ${b}
x_bucket{m="1",le="+Inf"} ${c}
x_sum{m="1"} 3`;
            const [before, after] = [text(1, 1, 1), text(5, 9, 11)].map(
                (reading) => parse(reading).buckets.get("x_bucket"));
            const at = (q) => quantile(q, after, before);
            const sum = parse(text(0, 0, 0)).values.get("x_sum");
            return [at(0.2), at(0.4), at(0.6), at(0.99), sum, quantile(0.5, after, after)];
        }"""
    )
    # Of 10 observations 4 are below 1, and 4 more below 2.5.
    assert found == [pytest.approx(0.5), 1, pytest.approx(1.75), 2.5, 3, None]


def test_the_documentation_asks_no_other_machine(browser: Browser, gateway: str) -> None:
    with closing(browser.new_page()) as page:
        asked: set[str] = set()
        page.on("request", lambda request: asked.add(request.url))
        page.goto(f"http://{gateway}/docs")
        expect(page.get_by_text("/v1/chat/completions")).to_be_visible()
    assert all(url.startswith((f"http://{gateway}/", "data:")) for url in asked)
