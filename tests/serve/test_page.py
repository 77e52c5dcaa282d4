"""The live page in a browser: it shows a server under load, and asks it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagedsim.experiments.benchmarks.serving import listening
from tests.serve.chromium import Chromium, find_browser

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="the page needs a Chromium: apt-get install chromium"
)
# Four run at once, so others wait; the longest answers take some 15 s, and nothing here as long.
SERVER = (
    "backend=sim", "memory=prefix", "memory.blocks=1024", "server.max_model_len=2048",
    "server.max_seqs=4",
)  # fmt: skip
LONG = 1800
GRID = "document.querySelector('#grid').dataset"
ANSWER = "document.querySelector('#answer').textContent"
PLACE = r"place \d of \d in the batch, \d+ blocks?, \d+ tokens"
STANDING = "document.querySelector('#standing').textContent"


@contextmanager
def others(url: str, requests: int) -> Iterator[list[http.client.HTTPConnection]]:
    """Long requests of another client; closing a connection aborts its request."""
    connections = []
    for _ in range(requests):
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        body = {"prompt": "x" * 200, "max_tokens": LONG}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        connections.append(connection)
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert BROWSER is not None
    with Chromium(BROWSER) as one:
        yield one


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(*SERVER) as child:
        yield child.url


DRAWN = """(() => {
    const canvas = document.querySelector("#grid");
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colours = {};
    for (let at = 0; at < data.length; at += 4) {
        const colour = data.slice(at, at + 4).join();
        colours[colour] = (colours[colour] ?? 0) + 1;
    }
    return colours;
})()"""


def drawn(browser: Chromium) -> set[str]:
    """The colours of at least a quarter of a cell, of what is drawn; not what is between cells."""
    colours: dict[str, int] = browser.evaluate(DRAWN)
    return {colour for colour, pixels in colours.items() if pixels > 50 and colour[-2:] != ",0"}


def rows(kind: str) -> str:
    return f"document.querySelectorAll('.{kind} tbody tr').length"


def ask(browser: Chromium, tokens: int) -> None:
    browser.type("[name=prompt]", "Count for me")
    browser.type("[name=max_tokens]", str(tokens))
    browser.click("#send")


def counts(text: str) -> bool:
    """Whether it is what the simulator answers: 1 2 3 and so on."""
    words = text.split()
    return words == [str(number) for number in range(1, len(words) + 1)]


def test_the_page_follows_the_load_and_a_prompt_is_answered(browser: Chromium, url: str) -> None:
    browser.open(f"{url}/")
    browser.wait(f"{GRID}.cells === '1024'")
    assert browser.evaluate(f"{GRID}.busy") == "0"
    (free,) = drawn(browser)
    with others(url, 6) as running:
        browser.wait(f"Number({GRID}.busy) > 12 && {rows('running')} === 4")
        browser.wait(f"{rows('waiting')} === 2")
        assert len(drawn(browser) - {free}) >= 3

        ask(browser, LONG)
        browser.wait(f"{STANDING} === 'waiting, place 3 of 3'")
        browser.wait("document.querySelectorAll('.waiting tr.mine').length === 1")
        for connection in running[:4]:
            connection.close()
        browser.wait(f"{ANSWER}.length > 20 && {rows('running')} === 3")
        browser.wait(f"Number({GRID}.mine) > 1 && document.querySelector('.running tr.mine')")
        assert re.fullmatch(PLACE, browser.evaluate(STANDING))
        some = browser.evaluate(ANSWER)
        browser.wait(f"{ANSWER}.length > {len(some) + 100}")
        assert browser.evaluate(ANSWER).startswith(some) and counts(some)

    browser.click("#stop")
    browser.wait(f"{GRID}.busy === '0' && {rows('running')} === 0")
    ask(browser, 20)
    browser.wait(f"{STANDING}.startsWith('ended at its bound: 20 tokens')")
    text = browser.evaluate(ANSWER)
    assert counts(text) and len(text.split()) == 20
    browser.wait("document.querySelector('#totals').textContent.includes('1 finished')")
    assert browser.errors == []


@pytest.mark.slow
def test_errors_are_shown_in_the_words_of_the_server(browser: Chromium, url: str) -> None:
    browser.open(f"{url}/")
    browser.wait(f"{GRID}.cells === '1024'")
    browser.type("[name=prompt]", "x" * 9000)
    browser.click("#send")
    browser.wait(f"{STANDING}.includes('2048')")
    assert browser.evaluate("document.querySelector('#send').disabled") is False
    browser.evaluate("document.querySelector('[name=chat]').click()")
    ask(browser, 3)
    browser.wait(f"{ANSWER} === ' 1 2 3' && {STANDING}.startsWith('ended at its bound: 3 tokens')")


@pytest.mark.slow
def test_a_missing_key_is_asked_for(browser: Chromium) -> None:
    with listening(*SERVER, "api_key=secret") as child:
        browser.open(f"{child.url}/")
        browser.wait(f"{GRID}.cells === '1024'")
        assert browser.evaluate("document.querySelector('#key-field').hidden")
        ask(browser, 3)
        browser.wait("document.activeElement.name === 'key'")
        browser.type("[name=key]", "secret")
        browser.click("#send")
        browser.wait(f"{ANSWER} === ' 1 2 3'")


@pytest.mark.slow
def test_a_lost_connection_is_shown_and_resumed(browser: Chromium) -> None:
    link = "document.querySelector('#link').dataset.state"
    with listening(*SERVER) as child:
        browser.open(f"{child.url}/")
        browser.wait(f"{link} === 'live'")
        child.process.terminate()
        browser.wait(f"{link} === 'lost'")
        child.process.wait(10)
        browser.errors.clear()
        with listening(*SERVER, f"port={child.url.rpartition(':')[2]}"):
            browser.wait(f"{link} === 'live'")
