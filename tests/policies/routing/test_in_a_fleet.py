"""Every router in a fleet that serves, on prompts that share their beginnings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from pagedsim.build import ROUTERS, make_memory, make_router, make_scheduler
from pagedsim.core import Request, Scheduler
from pagedsim.fleet.link import Network
from policies.routing.llumnix import Llumnix
from policies.routing.router import Move, Replica, Replicas, Router
from tests.fleet.fleets import served
from tests.sim.harness import Jobs

every_router = pytest.mark.parametrize("name", ROUTERS)

GROUPS, SHARED, OWN = 24, 192, 32
NETWORK = Network(bandwidth_gb_s=10)


@dataclass
class Shared(Jobs):
    """Prompts of groups, whose members begin alike; each group is a session."""

    def requests(self) -> Iterator[tuple[Request, int]]:
        random = Random(5)
        for number, (arrival, prompt, output) in enumerate(self.rows):
            group = random.randrange(GROUPS)
            begin = [10_000 * (group + 1) + at for at in range(SHARED)]
            own = [1_000_000 * (number + 1) + at for at in range(prompt)]
            yield (
                Request(number, begin + own, arrival=arrival, session=f"s{group}"),
                output,
            )


def scheduler(blocks: int = 160, block_size: int = 16, **more: Any) -> Scheduler:
    """One that has room for some of the groups."""
    memory = make_memory("prefix", blocks=blocks, block_size=block_size)
    return make_scheduler(
        memory=memory, batching="unified", max_seqs=16, max_batched_tokens=512, **more
    )


def table(
    router: str | Router, schedulers: list[Scheduler], rate: float = 40.0, **settings: Any
) -> Any:
    """The requests of a run, after a look that all are served once and nothing is left over."""
    random = Random(3)
    rows, at = [], 0.0
    for _ in range(300):
        at += random.expovariate(rate)
        rows.append((at, OWN + random.randrange(32), 1 + random.randrange(24)))
    requests, _ = served(
        schedulers, Shared(rows), make_router(router), network=NETWORK, token_bytes=1e5, **settings
    )
    assert sorted(requests["request"].to_pylist()) == list(range(300))
    assert set(requests["state"].to_pylist()) == {"finished"}
    for one in schedulers:
        one.check()
        assert not one.unfinished
    return requests


def cached(requests: Any) -> int:
    return sum(requests["cached_tokens"].to_pylist())


@every_router
def test_it_serves_with_unlike_replicas_and_old_news(name: str) -> None:
    unlike = [scheduler(), scheduler(90, 32), scheduler(500, 8, policy="priority")]
    table(name, unlike, rate=15.0, staleness=0.1)


@every_router
def test_it_serves_where_prompts_and_answers_are_apart(name: str) -> None:
    roles = ("prefill", "prefill", "decode", "decode", "both")
    requests = table(name, [scheduler() for _ in roles], rate=30.0, roles=roles)
    assert set(requests["replica"].to_pylist()) & {2, 3}


class Watched(Llumnix):
    """Sends to each in turn, and keeps who is to move."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[Move] = []

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return replicas[int(request.id) % len(replicas)]

    def migrate(self, replicas: Replicas, now: float) -> list[Move]:
        moves = [*super().migrate(replicas, now)]
        self.moves += moves
        return moves


def test_llumnix_moves_who_runs_from_the_crowded_to_the_free() -> None:
    """One has so little memory that its requests grow out of it."""
    router = Watched()
    table(router, [scheduler(blocks) for blocks in (40, 400, 400)], rate=30.0)
    assert {move.source.index for move in router.moves} == {0}
    assert len(router.moves) > 10


@pytest.mark.parametrize(
    "name", ["prefix_aware", "llm_d", "dynamo", "lmetric", "preble", "conductor", "sticky"]
)
def test_who_goes_by_prefixes_finds_more_in_caches(name: str) -> None:
    found, blind = (
        cached(table(one, [scheduler() for _ in range(4)], rate=15.0))
        for one in (name, "round_robin")
    )
    assert found > 1.3 * blind
