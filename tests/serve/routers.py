"""Routers of one's own, and a router before servers in this process."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from pagedsim.core import Request
from pagedsim.policies.routing.router import Refusal, Replica, Replicas, Router
from pagedsim.serve.router.listen import RouterListener, listener_of
from pagedsim.spec.composed import Composed
from pagedsim.spec.conf import Conf
from pagedsim.spec.run import RunSpec

ALIKE = ("model=tiny", "hardware=cpu")
"""Words of a server, for simulations of what is served here."""


class ByLength(Router):
    """Long prompts go to the first half of the replicas, short ones to the second, in turns."""

    def __init__(self, long: int = 100) -> None:
        self.long = long

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        half = len(replicas) // 2
        own = replicas[:half] if request.prompt_len >= self.long else replicas[half:]
        return min(own, key=lambda replica: replica.requests)


class Odd(Router):
    """Does what a prompt of so many tokens says."""

    def route(self, request: Request, replicas: Replicas, now: float) -> Any:
        if request.prompt_len == 1:
            return Refusal("too short")
        if request.prompt_len == 2:
            return "replica-0"
        if request.prompt_len == 3:
            raise KeyError("three")
        return replicas[0]


def spec_of(*words: str) -> RunSpec:
    """The configuration of a router that is served."""
    settings = Composed.of([*ALIKE, *words], Conf(root="serve")).resolved()
    del settings["router"]["backends"]
    return RunSpec(settings)


@dataclass
class Routed:
    """A router that listens."""

    url: str
    listener: RouterListener

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    @property
    def retries(self) -> int:
        return self.listener.front.dispatch.retries

    @property
    def up(self) -> list[bool]:
        return [server.up for server in self.listener.front.dispatch.servers]


def before(urls: Sequence[str], *words: str, key: str | None = None) -> RouterListener:
    """A router before these servers."""
    places = [(f"replica-{index}", url, None) for index, url in enumerate(urls)]
    return listener_of(spec_of("drain=1", *words), places, key, {})


@contextmanager
def routing(urls: Sequence[str], *words: str, key: str | None = None) -> Iterator[Routed]:
    """It listens until the block ends, and has drained then."""
    listener = before(urls, *words, key=key)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(listener.serve([listening])))
        thread.start()
        try:
            while not listener.started:
                assert thread.is_alive()
                threading.Event().wait(0.01)
            yield Routed(f"http://127.0.0.1:{listening.getsockname()[1]}", listener)
        finally:
            listener.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def numbers(metrics: str) -> dict[str, float]:
    """The router's own metrics by name."""
    found = re.findall(r"^pagedsim:router_(\S+) (\S+)$", metrics, re.MULTILINE)
    return {name: float(value) for name, value in found}
