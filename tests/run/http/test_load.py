"""Requests are sent when they are due, and as many at once as may be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pagedsim.core import Request
from pagedsim.core.source import Job, Mode
from pagedsim.run.http.load import Load, Seen


@dataclass
class Some:
    """A workload of a few requests."""

    arrivals: tuple[float | None, ...]
    mode: Mode = "open"
    users: int | None = None
    think_time: float = 0.0
    turns: None = None

    def requests(self) -> Iterator[Job]:
        for id, arrival in enumerate(self.arrivals):
            yield Request(id, 5, arrival=arrival), 3


class Server:
    """Answers after `seconds`, and counts."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.running = self.most = 0
        self.asked: list[int] = []

    async def ask(self, seen: Seen, body: bytes) -> None:
        assert body == str(seen.id).encode()
        self.asked.append(int(seen.id))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1


def sent(source: Some, server: Server, **how: int) -> tuple[list[Seen], Load]:
    """All requests in the order in which they ended."""
    ended: list[Seen] = []

    async def go() -> Load:
        begun = time.perf_counter()
        load = Load(
            source,
            lambda request, _: str(request.id).encode(),
            server.ask,
            lambda: time.perf_counter() - begun,
            **how,
        )
        await load.run(ended.append)
        return load

    return ended, asyncio.run(go())


def test_an_open_loop_sends_each_at_its_time_and_waits_for_no_answer() -> None:
    server = Server(seconds=0.05)
    ended, load = sent(Some((0.0, 0.01, 0.02, 0.03)), server)
    assert [one.arrival for one in ended] == [0.0, 0.01, 0.02, 0.03]
    assert all(one.sent is not None and one.sent >= (one.arrival or 0) for one in ended)
    assert server.most > 1 and len(load.late) == 4 and min(load.late) >= 0


def test_a_burst_is_due_at_once() -> None:
    server = Server(seconds=0.05)
    ended, _ = sent(Some((0.0, 1.0, 2.0), mode="burst"), server)
    assert [one.arrival for one in ended] == [0, 0, 0] and server.most == 3


def test_users_wait_for_answers_and_think() -> None:
    server = Server()
    ended, _ = sent(Some((None,) * 6, mode="closed", users=2, think_time=0.02), server)
    assert server.most == 2 and server.asked == list(range(6))
    arrivals = sorted(one.arrival or 0.0 for one in ended)
    assert arrivals[:2] == [0, 0] and all(at >= 0.03 for at in arrivals[2:])


def test_who_finds_no_place_waits_and_its_arrival_is_when_it_was_due() -> None:
    server = Server(seconds=0.02)
    ended, load = sent(Some((0.0,) * 4), server, concurrency=1)
    assert server.most == 1
    assert [one.arrival for one in ended] == [0.0] * 4
    waits = [(one.sent or 0.0) for one in ended]
    assert waits == sorted(waits) and waits[-1] >= 0.06
    # To wait for a place is not to be late, so neither holds any of the time of the other.
    assert sum(load.late) <= waits[-1] - 3 * server.seconds


def test_it_ends_when_it_is_asked_to_and_says_who_was_on_the_way() -> None:
    server, ended = Server(seconds=60), list[Seen]()

    async def go() -> Load:
        begun = time.perf_counter()
        clock = lambda: time.perf_counter() - begun  # noqa: E731
        load = Load(Some((0.0, 0.0, 50.0)), lambda one, _: str(one.id).encode(), server.ask, clock)
        await load.run(ended.append, lambda: server.running == 2)
        return load

    load = asyncio.run(go())
    assert ended == [] and {one.id for one in load.running} == {0, 1}
    assert all(one.alive for one in load.running)


def test_a_fault_of_ours_is_raised_as_it_is() -> None:
    class Broken(Server):
        async def ask(self, seen: Seen, body: bytes) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sent(Some((0.0, 9.0)), Broken())
