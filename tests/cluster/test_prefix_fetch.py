"""Prefixes fetched from another replica's cache, by hand.

Prompts take a second a token, other steps one second; eight bytes go over a link in a second.
Blocks have four tokens. Of a prompt of 9 tokens two blocks are found again: with a byte a token
they come in a second, and one token is computed after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.cluster.dispatcher import Dispatcher
from pagedsim.cluster.failures import ListedOutages
from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.core.offload import OffloadConnector
from pagedsim.policies.routing.conductor import Conductor
from pagedsim.policies.routing.router import Replica, Replicas, Router
from pagedsim.policies.routing.simple import RoundRobin
from pagedsim.sglang.hicache import HiCache
from pagedsim.sim.copies import CopyTimes
from pagedsim.sim.transfers import Transfers
from tests.cluster.fleets import NETWORK, server, whole
from tests.sim.harness import Constant, Jobs

FIRST = (0.0, 9, 1)
prefix = partial(server, "prefix", batching="unified")


class ATokenASecond(Constant):
    """Prompts take a second a token."""

    def step_seconds(self, plan: StepPlan) -> float:
        return float(plan.prefill_tokens or 1)


@dataclass
class Prompts(Jobs):
    """Prompts that begin at some token: equal beginnings are equal prefixes."""

    starts: Sequence[int] = ()

    def requests(self) -> Iterator[tuple[Request, int]]:
        for (request, output), start in zip(super().requests(), self.starts, strict=True):
            request._prompt = range(start, start + request.prompt_len)
            yield request, output


def fetched(
    schedulers: Sequence[Scheduler],
    rows: Sequence[tuple[float, int, int]],
    starts: Sequence[int] = (),
    router: Router | None = None,
    fetch: str = "sooner",
    **more: Any,
) -> tuple[Dispatcher, dict[str, list[Any]]]:
    """The dispatcher, and the columns of requests with the tokens that were fetched for each."""
    jobs = Prompts(rows, starts=starts or [0] * len(rows))
    settings = {"token_bytes": 1.0, "network": NETWORK, "fetch": fetch, **more}
    dispatcher, recorder = whole(
        schedulers, jobs, router or RoundRobin(), ATokenASecond(), **settings
    )
    for scheduler in schedulers:
        scheduler.check()
        assert scheduler.memory.used == 0 and not scheduler.migration.held
    assert not any(replica.incoming for replica in dispatcher.replicas)
    columns = recorder.requests_table().to_pydict()
    tokens = dispatcher.fetches.tokens if dispatcher.fetches is not None else {}
    return dispatcher, columns | {"fetched": [tokens.get(name, 0) for name in columns["request"]]}


SECOND = (20.0, 9, 1)


@pytest.mark.parametrize(
    ("rows", "more", "first_token", "tokens"),
    [
        pytest.param([SECOND], {}, [22.0], [8], id="a second on the way, a token computed"),
        pytest.param([SECOND], {"fetch": "never"}, [29.0], [0], id="all computed"),
        pytest.param([SECOND], {"token_bytes": 8.0}, [29.0], [0], id="8 s are not saved by 8 s"),
        pytest.param(
            *([SECOND], {"token_bytes": 8.0, "fetch": "always"}, [29.0], [8]), id="8 s, whatever"
        ),
        pytest.param([SECOND] * 2, {}, [22.0, 23.0], [8, 8], id="the second waits for the first"),
        pytest.param(
            *([SECOND] * 2, {"token_bytes": 5.0}, [26.0, 29.0], [8, 0]),
            id="behind another that takes 5 s, 5 s are too long",
        ),
        pytest.param([(20.0, 4, 1)], {}, [24.0], [0], id="one token at least is to be computed"),
        pytest.param(
            *([SECOND], {"failures": ListedOutages({0: [(20.5, 9.0)]})}, [29.5], [0]),
            id="the source dies on the way: computed from then on",
        ),
        pytest.param(
            *([SECOND], {"failures": ListedOutages({1: [(20.5, 99.0)], 2: [(1.0, 99.0)]})}),
            *([21.5], [0]),
            id="the target dies on the way: it begins anew where the prefix is",
        ),
    ],
)
def test_a_prefix_comes_before_its_request_is_added(
    rows: list[tuple[float, int, int]],
    more: dict[str, Any],
    first_token: list[float],
    tokens: list[int],
) -> None:
    three = [prefix() for _ in range(3)]
    dispatcher, table = fetched(three, [FIRST, *rows], **more)
    assert table["first_token"][1:] == first_token
    assert table["fetched"][1:] == tokens
    dies = dict(more.get("failures", ListedOutages({})).outages)
    assert dispatcher.retries[1] == (1 in dies)
    if not dies:
        assert table["cached_tokens"][1:] == tokens


def radix(hicache: bool = False) -> Scheduler:
    memory = (
        HiCache(64, 4, host_blocks=64) if hicache else make_memory("radix", blocks=64, block_size=4)
    )
    return make_scheduler(memory=memory, batching="sglang")


@pytest.mark.parametrize("hicache", [False, True])
def test_a_radix_tree_gets_prefixes_too(hicache: bool) -> None:
    two = [radix(hicache) for _ in range(2)]
    copies = [{"transfers": Transfers(CopyTimes(1.0, 1, 1e9))} if hicache else {} for _ in two]
    _, table = fetched(two, [FIRST, SECOND], server=copies)
    assert (table["first_token"][1], table["fetched"][1]) == (22.0, 8)


@pytest.mark.parametrize(
    ("evicting", "tokens", "first_token"), [(5, 8, 29.0), (9, 4, 33.0), (13, 0, 37.0)]
)
def test_what_the_source_has_evicted_meanwhile_is_computed(
    evicting: int, tokens: int, first_token: float
) -> None:
    """It has four blocks, of which two, the later one first, go to another prompt at 21 s."""
    two = [prefix(blocks=4), prefix()]
    rows = [FIRST, SECOND, (21.0, evicting, 1)]
    _, table = fetched(two, rows, [0, 0, 100], fetch="always", token_bytes=8.0)
    assert (table["fetched"][1], table["first_token"][1]) == (tokens, first_token)


def test_a_prefix_in_host_memory_is_fetched_from_there() -> None:
    """The source has evicted it from its GPU; what the target has on its own host is loaded."""
    two = [
        make_scheduler(
            memory=make_memory("prefix", blocks=blocks, block_size=4),
            batching="unified",
            connector=OffloadConnector(64),
        )
        for blocks in (4, 8)
    ]
    copies = [{"transfers": Transfers(CopyTimes(1.0, 1, 1e9))} for _ in two]
    rows = [FIRST, (0.0, 9, 1), (10.0, 13, 1), (30.0, 9, 1), (40.0, 13, 1), (60.0, 30, 1)]
    rows += [(91.0, 9, 1)]
    starts = [0, 100, 200, 0, 300, 400, 0]
    _, table = fetched(two, rows, starts, router=Turns([0, 1, 0, 1, 0, 1, 1]), server=copies)
    assert table["fetched"] == [0, 0, 0, 8, 0, 0, 0]
    assert table["first_token"][3] == 32.0
    assert table["cached_tokens"][-1] == 8


class Turns(Router):
    """Replicas in a given order; sees the second one at each arrival."""

    def __init__(self, turns: Sequence[int]) -> None:
        self.turns = list(turns)
        self.seen: list[tuple[int, ...]] = []

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        there = replicas[1]
        load = there.requests, there.waiting, there.owed_tokens
        self.seen.append((*load, there.wanted_blocks, there.free_blocks))
        return replicas[self.turns.pop(0)]


def test_memory_is_held_for_a_prefix_on_its_way() -> None:
    """From 20 to 21 s two of the three blocks that the request needs are held."""
    router = Turns([0, 1, 0])
    fetched([prefix(), prefix(blocks=10)], [FIRST, SECOND, (20.5, 9, 1)], router=router)
    assert router.seen[1:] == [(0, 0, 0, 0, 10), (1, 1, 9, 1, 8)]


def test_what_was_fetched_for_an_urgent_request_is_evicted_last() -> None:
    """Of three blocks two go to another prefix; the requests' priorities are 1, 3 and 2."""
    cache = make_memory("prefix", blocks=3, block_size=4, eviction="priority")
    receiver = make_scheduler(memory=cache, batching="unified").migration
    urgent, *others = [Request(at, [at] * 5, priority=at) for at in (1, 3, 2)]
    for request in (urgent, *others):
        assert receiver.expect_prefix(request, 4, 0.0)
        assert receiver.put_prefix(request, 4, 0.0) == 4
    assert receiver.expect_prefix(Request(4, [4] * 9), 8, 0.0)
    assert [len(cache.lookup(request)) for request in (urgent, *others)] == [1, 0, 0]


def test_a_prefix_without_room_is_computed() -> None:
    """Another prompt has 8 of 9 blocks until 33 s."""
    router = Turns([0, 1, 1])
    rows = [FIRST, (1.0, 32, 1), SECOND]
    _, table = fetched([prefix(), prefix(blocks=9)], rows, [0, 100, 0], router=router)
    assert (table["fetched"][2], table["first_token"][2]) == (0, 33.0 + 9.0)


def test_a_draining_source_sends_what_it_has_promised() -> None:
    """It stops when the fetch has ended, and not before."""

    class Drains(Turns):
        dispatcher: Dispatcher

        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            if now == 20.5:
                self.dispatcher.environment.process(self._drain())
            return super().route(request, replicas, now)

        def _drain(self) -> Any:
            yield self.dispatcher.environment.timeout(0)
            self.dispatcher.drain(self.dispatcher.replicas[0])

    router = Drains([0, 1, 1])
    begins = partial(setattr, router, "dispatcher")
    rows = [FIRST, SECOND, (20.5, 4, 1)]
    dispatcher, table = fetched([prefix(), prefix()], rows, router=router, begins=begins)
    assert table["fetched"][1] == 8
    assert dispatcher.states.paid()[0] == [(0.0, 21.0)]


@pytest.mark.parametrize(
    ("fetch", "replica", "first_token"), [("never", 0, 81.0), ("sooner", 1, 67.0)]
)
def test_the_conductor_weighs_fetches(fetch: str, replica: int, first_token: float) -> None:
    """The replica that has 40 tokens computes 20 others until 80 s, and then one; the other one
    fetches the 40 in 5 s and computes one."""
    rows = [(0.0, 41, 1), (60.0, 20, 1), (61.0, 41, 1)]
    _, table = fetched([prefix(), prefix()], rows, [0, 100, 0], Conductor(), fetch)
    assert (table["replica"][2], table["first_token"][2]) == (replica, first_token)
