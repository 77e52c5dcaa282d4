"""The live page in a browser: it shows a server under load, and asks it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from experiments.chromium import Chromium, find_browser

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="the page needs a Chromium: apt-get install chromium"
)
# Four run at once, so others wait.
SERVER = (
    "backend=sim", "memory=prefix", "memory.blocks=128", "server.max_model_len=512",
    "server.max_seqs=4", "speed=2", "port=0",
)  # fmt: skip
GRID = "document.querySelector('#grid').dataset"
ANSWER = "document.querySelector('#answer').textContent"
PLACE = r"place \d of \d in the batch, \d+ blocks?, \d+ tokens"
STANDING = "document.querySelector('#standing').textContent"


@contextmanager
def server(*words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own, and its address."""
    command = [sys.executable, "-m", "pagedsim", "serve", *SERVER, *words]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        found = re.search(r"http://\S+", said)
        assert found, said + process.stderr.read()
        yield found[0], process
    finally:
        process.terminate()
        process.communicate(timeout=20)


def send(url: str, tokens: int) -> None:
    """A request of somebody else's, answered in one piece."""
    body = {"prompt": "x" * 200, "max_tokens": tokens}
    asked = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    threading.Thread(target=lambda: urllib.request.urlopen(asked).read(), daemon=True).start()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert BROWSER is not None
    with Chromium(BROWSER) as one:
        yield one


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as (address, _):
        yield address


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


def test_the_page_follows_the_load_and_a_prompt_is_answered(browser: Chromium, url: str) -> None:
    browser.open(f"{url}/")
    browser.wait(f"{GRID}.cells === '128'")
    assert browser.evaluate(f"{GRID}.busy") == "0"
    (free,) = drawn(browser)
    for number in range(6):
        send(url, 100 + 10 * number)
    browser.wait(f"Number({GRID}.busy) > 8 && {rows('running')} === 4 && {rows('waiting')} === 2")
    assert len(drawn(browser) - {free}) >= 4

    browser.type("[name=prompt]", "Count for me")
    browser.type("[name=max_tokens]", "100")
    browser.click("#send")
    # Nobody is let in before the two who wait.
    browser.wait("document.querySelectorAll('.waiting tr.mine').length === 1")
    browser.wait(f"{STANDING} === 'waiting, place 3 of 3'")
    browser.wait(f"{ANSWER}.length > 20")
    browser.wait(f"Number({GRID}.mine) > 0 && document.querySelector('.running tr.mine')")
    assert re.fullmatch(PLACE, browser.evaluate(STANDING))
    some = browser.evaluate(ANSWER)
    browser.wait(f"{STANDING}.includes('100 tokens')")
    whole = browser.evaluate(ANSWER)
    assert whole.startswith(some) and len(whole) > len(some)
    assert whole.split() == [str(number) for number in range(1, 101)]

    browser.wait(f"{GRID}.busy === '0' && {rows('running')} === 0")
    assert "7 finished" in browser.evaluate("document.querySelector('#totals').textContent")
    assert browser.errors == []


@pytest.mark.slow
def test_stop_gives_the_request_up(browser: Chromium, url: str) -> None:
    browser.open(f"{url}/")
    browser.wait(f"{GRID}.cells === '128'")
    browser.type("[name=max_tokens]", "400")
    browser.click("#send")
    browser.wait(f"{ANSWER}.length > 5 && Number({GRID}.busy) > 0")
    browser.click("#stop")
    browser.wait(f"{STANDING}.startsWith('stopped after')")
    browser.wait(f"{GRID}.busy === '0'")
    assert "1 aborted" in browser.evaluate("document.querySelector('#totals').textContent")


@pytest.mark.slow
def test_what_is_wrong_is_told_in_the_servers_words(browser: Chromium, url: str) -> None:
    browser.open(f"{url}/")
    browser.wait(f"{GRID}.cells === '128'")
    browser.type("[name=prompt]", "x" * 4000)
    browser.click("#send")
    browser.wait(f"{STANDING}.includes('512')")
    assert browser.evaluate("document.querySelector('#send').disabled") is False
    browser.evaluate("document.querySelector('[name=chat]').click()")
    browser.type("[name=prompt]", "Count for me")
    browser.type("[name=max_tokens]", "3")
    browser.click("#send")
    browser.wait(f"{ANSWER} === ' 1 2 3' && {STANDING}.startsWith('ended at its bound: 3 tokens')")


@pytest.mark.slow
def test_a_key_is_asked_for_where_there_is_one(browser: Chromium) -> None:
    with server("api_key=secret") as (url, _):
        browser.open(f"{url}/")
        browser.wait(f"{GRID}.cells === '128'")
        assert browser.evaluate("document.querySelector('#key-field').hidden")
        browser.type("[name=max_tokens]", "3")
        browser.click("#send")
        browser.wait("document.activeElement.name === 'key'")
        browser.type("[name=key]", "secret")
        browser.click("#send")
        browser.wait(f"{ANSWER} === ' 1 2 3'")


@pytest.mark.slow
def test_a_row_and_a_cell_say_whose_they_are(browser: Chromium, url: str) -> None:
    browser.open(f"{url}/")
    browser.wait(f"{GRID}.cells === '128'")
    send(url, 400)
    browser.wait(f"{rows('running')} === 1 && Number({GRID}.busy) > 4")
    before = drawn(browser)
    browser.evaluate("document.querySelector('#grid').focus()")
    browser.press("ArrowRight")  # the first cell, whoever has it
    told = browser.evaluate("document.querySelector('#tip').textContent")
    assert "block 0" in told
    browser.click(".running tbody tr")
    browser.wait("document.querySelector('.running tr.pinned')")
    browser.press("Escape")
    browser.wait("!document.querySelector('.running tr.pinned')")
    assert before & drawn(browser)


@pytest.mark.slow
def test_a_lost_connection_is_told_and_taken_up_again(browser: Chromium) -> None:
    link = "document.querySelector('#link').dataset.state"
    with server() as (url, process):
        browser.open(f"{url}/")
        browser.wait(f"{link} === 'live'")
        process.terminate()
        browser.wait(f"{link} === 'lost'")
        process.wait(10)
        browser.errors.clear()
        with server(f"port={url.rpartition(':')[2]}"):
            browser.wait(f"{link} === 'live'")


@pytest.mark.slow
def test_a_phone_sees_all_of_it_in_its_width(browser: Chromium, url: str) -> None:
    browser.shape(360, 740, 2)
    try:
        browser.open(f"{url}/")
        browser.wait(f"{GRID}.cells === '128'")
        assert browser.evaluate("document.documentElement.scrollWidth") == 360
    finally:
        browser.shape(1280, 800)
