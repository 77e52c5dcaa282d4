"""The check of routers passes those that keep their promises, and names the first broken one."""

from __future__ import annotations

import random
from threading import Lock
from typing import Any

import pytest

from pagedsim.build import ROUTERS, make_router
from pagedsim.core import Request
from pagedsim.policies.routing.router import Refusal, Replicas, Router
from pagedsim.testing import check_router


class First(Router):
    def route(self, request: Request, replicas: Replicas, now: float) -> Any:
        return replicas[0]


class Rejecting(First):
    def route(self, request: Request, replicas: Replicas, now: float) -> Any:
        return Refusal("too long") if request.prompt_len > 9 else replicas[0]


class Number(First):
    def route(self, request: Request, replicas: Replicas, now: float) -> Any:
        return len(replicas)


class Absent(First):
    def route(self, request: Request, replicas: Replicas, now: float) -> Any:
        others = [one for one in replicas.all_replicas if one.role not in ("both", replicas.role)]
        return (others or replicas)[0]


class Queueing(First):
    def route(self, request: Request, replicas: Replicas, now: float) -> Any:
        return None


class Hoarding(Queueing):
    holds = True


class Drawn(First):
    def route(self, request: Request, replicas: Replicas, now: float) -> Any:
        return random.choice(replicas)


class Blind(First):
    blind = True

    def route(self, request: Request, replicas: Replicas, now: float) -> Any:
        return min(replicas, key=lambda replica: replica.requests)


class Local(First):
    def __init__(self) -> None:
        self.weight = Lock()


class Wandering(First):
    migrates_every = 0.05

    def migrate(self, replicas: Replicas, now: float) -> Any:
        return replicas[0]


@pytest.mark.parametrize("name", ROUTERS)
def test_the_routers_of_pagedsim_keep_their_promises(name: str) -> None:
    check_router(lambda: make_router(name), cases=6)


def test_a_router_may_refuse() -> None:
    check_router(Rejecting, cases=6)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Number, r"Number: Number\.route gave \d: must be one of the replicas that it was given"),
        (Absent, r"Absent: Absent\.route gave .*: must be one of the replicas"),
        (
            Queueing,
            r"Queueing: Queueing\.route returned None: a router that queues requests must set hold",
        ),
        (Hoarding, r"Hoarding: Hoarding\.route returned None although every replica is idle"),
        (Drawn, r"Drawn: two runs of the same requests differ: .* in row \d+ of the"),
        (Blind, r"Blind\.blind=True: it reads replicas: .* in row \d+ of the"),
        (Local, r"Local: cannot be copied: TypeError: .*lock"),
        (Wandering, r"Wandering: Wandering\.migrate gave .*: must be a list of Move"),
    ],
)
def test_the_first_broken_promise_is_named(kind: type[Router], told: str) -> None:
    with pytest.raises(AssertionError, match=rf"^{told}") as error:
        check_router(kind)
    assert "\n" not in str(error.value)
