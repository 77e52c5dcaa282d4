"""The README's picture of the live page: a server under load, asked from the page itself.

    python -m pagedsim.experiments.live_page [--seconds 65] [--dark] [--width 1280] [--to page.png]

Starts a server on the simulator, sends it requests of four clients for as long, asks it from the
page in a headless Chromium, and takes the picture while the answer streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path

import aiohttp

from pagedsim.experiments.child import listening
from pagedsim.experiments.chromium import Chromium, find_browser

PICTURE = Path(__file__).parent / "results" / "serve" / "page.png"
SERVER = (
    "backend=sim", "model=llama-3.1-8b", "hardware=rtx4090", "memory=prefix", "memory.blocks=1536",
    "preemption=swap", "policy=priority", "batching=unified", "server.max_model_len=4096",
)  # fmt: skip
CLIENTS = (("chat", 0, 0.5), ("search", 0, 0.2), ("code", 0, 0.2), ("batch", 1, 0.1))
"""Clients with their priorities and shares of the requests."""
RATE = 9.5
"""Requests a second."""
PROMPT = "Explain in a few sentences why an LLM server keeps its cache in blocks."


async def load(url: str, seed: int = 0) -> None:
    """Requests, at random times and of random lengths, until cancelled."""
    random_ = random.Random(seed)
    openings = [text(random_, 4 * length) for length in (96, 160, 320)]
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        while True:
            name, priority, _ = random_.choices(CLIENTS, [share for *_, share in CLIENTS])[0]
            begins = random_.choice(openings) if random_.random() < 0.5 else ""
            length = min(int(random_.lognormvariate(5.0, 0.8)) + 1, 1500)
            body = {
                "prompt": begins + text(random_, 4 * length),
                "max_tokens": min(int(random_.lognormvariate(5.2, 0.7)) + 1, 1500),
                "n": 2 if random_.random() < 0.03 else 1,
                "user": name,
                "priority": priority,
            }
            group.create_task(ask(session, f"{url}/v1/completions", body))
            await asyncio.sleep(random_.expovariate(RATE))


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> None:
    """Send one request and ignore its outcome."""
    async with session.post(url, json=body) as response:
        await response.read()


def text(random_: random.Random, letters: int) -> str:
    """A prompt that shares no prefix with others."""
    return "".join(random_.choices("etaoin shrdlu", k=letters))


async def picture(url: str, seconds: float, browser: str, shape: argparse.Namespace) -> None:
    """Let the load run, ask from the page, and take the picture while the answer streams."""
    running = asyncio.create_task(load(url))
    await asyncio.sleep(seconds)
    try:
        await asyncio.to_thread(take, url, browser, shape)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def take(url: str, browser: str, shape: argparse.Namespace) -> None:
    """Ask from the page and take the picture."""
    with Chromium(browser, width=shape.width, height=900, dark=shape.dark) as page:
        page.open(f"{url}/")
        page.wait("Number(document.querySelector('#grid').dataset.busy) > 0")
        page.type("[name=prompt]", PROMPT)
        page.type("[name=max_tokens]", "400")
        page.click("#send")
        page.wait("document.querySelector('#answer').textContent.length > 400")
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        shape.to.parent.mkdir(parents=True, exist_ok=True)
        page.picture(shape.to)
        drawn = page.evaluate("JSON.stringify(document.querySelector('#grid').dataset)")
        print(f"{shape.to}: {shape.to.stat().st_size // 1024} KiB; {json.loads(drawn)}")


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=65.0, help="of load before the picture")
    parser.add_argument("--width", type=int, default=1280, help="of the page, in CSS pixels")
    parser.add_argument("--dark", action="store_true", help="as readers of dark pages see it")
    parser.add_argument("--to", type=Path, default=PICTURE, help="the file")
    shape = parser.parse_args()
    if (browser := find_browser()) is None:
        parser.error("needs a Chromium in PATH")
    with listening(*SERVER) as child:
        asyncio.run(picture(child.url, shape.seconds, browser, shape))


if __name__ == "__main__":
    main()
