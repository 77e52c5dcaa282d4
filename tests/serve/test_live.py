"""Snapshots: shared by all viewers, none without viewers, only the newest for a slow one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import pytest

pytest.importorskip("fastapi")

import httpx
from fastapi import FastAPI

from pagedsim.core import PagedMemory, PagedsimError, Request, Scheduler, Unified
from pagedsim.serve.api import live as module
from pagedsim.serve.api.live import Live, add_live
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.snapshot import RollingStats

T = TypeVar("T")


class Engine(AsyncLLMEngine):
    """Answers questions about a scheduler with one request, or says why it does not."""

    now, lag = 0.25, 0.25

    def __init__(self) -> None:
        self.scheduler = Scheduler(memory=PagedMemory(8, 4), batching=Unified())
        self.scheduler.add(Request("a", 6), 0.0, 9)
        self.scheduler.commit(self.scheduler.plan(0.0), 0.25)
        self.asked = 0
        self.failure: PagedsimError | None = None

    async def ask(self, question: Callable[[Any], T]) -> T:
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return question(self)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.005)


def live(engine: Engine) -> Live:
    return Live(engine, RollingStats(), {"model": "m", "backend": "sim", "policy": "fcfs"})


async def read(events: AsyncIterator[str]) -> dict[str, Any]:
    event = await asyncio.wait_for(anext(events), 5)
    assert event.startswith("data: ") and event.endswith("\n\n")
    assert event.count("\n") == 2
    taken: dict[str, Any] = json.loads(event.removeprefix("data: "))
    return taken


def test_a_viewer_sees_what_the_server_is_and_what_it_does() -> None:
    async def look() -> dict[str, Any]:
        return await read(live(Engine()).look([]))

    found = asyncio.run(look())
    assert (found["model"], found["backend"], found["policy"]) == ("m", "sim", "fcfs")
    assert [row["id"] for row in found["running"]["first"]] == ["a"]
    assert found["blocks"]["cells"] == [0, 1, 0, 2, -1, 0, 0, 6]


def test_viewers_share_snapshots_and_each_gets_its_watched_requests() -> None:
    async def look() -> tuple[int, int, list[list[str]]]:
        engine = Engine()
        shared = live(engine)
        one, other = shared.look([]), shared.look(["a", "who?"])
        first = [await read(one), await read(other)]
        for _ in range(4):
            await read(one)
        watched = [[row["id"] for row in found["watched"]] for found in (*first, await read(one))]
        return engine.asked, shared.taken, watched

    asked, made, watched = asyncio.run(look())
    assert asked <= made + 1 <= 9
    assert watched[-1] == ["a"]


def test_nothing_is_made_without_a_viewer() -> None:
    async def look() -> tuple[int, int, int]:
        engine = Engine()
        shared = live(engine)
        await asyncio.sleep(0.03)
        before = engine.asked
        events = shared.look([])
        await read(events)
        await events.aclose()
        assert shared.viewers == 0
        await asyncio.sleep(0.03)
        after = engine.asked
        await asyncio.sleep(0.05)
        again = shared.look([])
        await read(again)
        return before, engine.asked - after, shared.viewers

    assert asyncio.run(look()) == (0, 1, 1)


def test_a_slow_viewer_gets_the_newest_and_none_twice() -> None:
    async def look() -> list[float]:
        engine = Engine()
        shared = live(engine)
        slow, seen = shared.look([]), []
        for step in range(1, 4):
            engine.now = float(step)
            seen.append((await read(slow))["now"])
            engine.now = step + 0.5
            made = shared.taken
            while shared.taken < made + 3:  # these it misses
                await asyncio.sleep(0.001)
        return seen

    assert asyncio.run(look()) == [1.0, 1.5, 2.5]


def test_a_dead_engine_is_shown() -> None:
    async def look() -> tuple[dict[str, Any], dict[str, Any]]:
        engine = Engine()
        engine.failure = PagedsimError("the engine has stopped: it broke")
        events = live(engine).look([])
        dead = await read(events)
        engine.failure = None
        return dead, await read(events)

    dead, alive = asyncio.run(look())
    assert dead["failure"] == "the engine has stopped: it broke"
    assert "failure" not in alive


def test_streams_end_when_the_server_closes() -> None:
    async def look() -> None:
        shared = live(Engine())
        events, read_later = shared.look([]), asyncio.Event()
        await read(events)

        async def rest() -> None:
            async for _ in events:
                read_later.set()

        reading = asyncio.create_task(rest())
        await asyncio.wait_for(read_later.wait(), 5)
        shared.close()
        await asyncio.wait_for(reading, 5)
        assert [event async for event in shared.look([])] == []

    asyncio.run(look())


# -- over HTTP -----------------------------------------------------------------------------------


def get(app: FastAPI, path: str) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(call())


@pytest.fixture(scope="module")
def app() -> FastAPI:
    made = FastAPI()
    add_live(made, Engine(), RollingStats(), {"model": "m"})
    return made


def test_every_file_that_the_page_names_is_served_and_names_no_other_address(app: FastAPI) -> None:
    page = get(app, "/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"] == "default-src 'self'; img-src 'self' data:"
    names = {"page.css", "page.js"}
    assert all(f'"page/{name}"' in page.text for name in names)
    seen: set[str] = set()
    while names - seen:
        name = (names - seen).pop()
        seen.add(name)
        file = get(app, f"/page/{name}")
        assert file.status_code == 200 and file.headers["content-type"].startswith("text/"), name
        names |= {word.partition('"')[0] for word in file.text.split('from "./')[1:]}
        addresses = file.text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in addresses and "https:" not in addresses, name
    assert len(seen) == 10


@pytest.mark.parametrize("name", ["nothing.js", "%2e%2e/api/live.py"])
def test_nothing_else_is_served(app: FastAPI, name: str) -> None:
    assert get(app, f"/page/{name}").status_code == 404


def test_too_many_watched_are_refused(app: FastAPI) -> None:
    assert get(app, f"/live?{'&'.join(['watch=a'] * 9)}").status_code == 422
