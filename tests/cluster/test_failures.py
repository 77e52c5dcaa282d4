"""Replicas die, with everything on them, and come back empty. Steps take a second."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from pagedsim.cluster.failures import ListedOutages, RandomOutages, failures_of
from pagedsim.core import PagedsimError, Request
from pagedsim.metrics.steps import FleetSteps
from pagedsim.policies.routing.router import Replica, Replicas, Router
from pagedsim.policies.routing.simple import RoundRobin
from tests.cluster.fleets import Watching, served, server, whole
from tests.core.refusals import refusal
from tests.sim.harness import Constant, Jobs

scheduler = partial(server, max_seqs=4)


def test_a_lost_request_restarts_at_another_replica() -> None:
    """A step takes a second. Request 0 is at replica 0, in its third step when that dies at 2.5."""
    router = Watching()
    jobs = Jobs([(0.0, 3, 6), (0.25, 3, 6)])
    requests, steps = served(
        [scheduler(), scheduler()],
        jobs,
        router,
        Constant(),
        failures=ListedOutages({0: [(2.5, 10.0)]}),
    )
    assert requests["replica"].to_pylist() == [1, 1]
    assert requests["output_tokens"].to_pylist() == [6, 6]
    assert requests["arrival"].to_pylist() == [0.0, 0.25]
    # Replica 1 has a step from 2.25 to 3.25; the next one takes the newcomer in.
    assert requests["first_token"].to_pylist() == [4.25, 1.25]
    assert isinstance(steps, FleetSteps)
    assert steps.replicas[0].table()["end"].to_pylist() == [1.0, 2.0]  # the third never ended
    assert router.seen == [
        (0.0, "Placed", 0, 0),
        (0.25, "Placed", 1, 1),
        (2.5, "Left", 0, 0),
        (2.5, "Placed", 0, 1),
        (7.25, "Left", 1, 1),
        (9.25, "Left", 0, 1),
    ]


def test_a_router_sees_what_a_lost_request_carries() -> None:
    seen: list[object] = []

    class Sees(RoundRobin):
        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            seen.append(request.extra.get("tenant"))
            return super().route(request, replicas, now)

    class Carrying(Jobs):
        def requests(self) -> Iterator[tuple[Request, int]]:
            for request, output in super().requests():
                request._extra = {"tenant": "a"}
                yield request, output

    jobs, outage = Carrying([(0.0, 3, 6)]), ListedOutages({0: [(2.5, 10.0)]})
    served([scheduler(), scheduler()], jobs, Sees(), Constant(), failures=outage)
    assert seen == ["a", "a"]


def test_outages_back_to_back_are_one_in_any_numbers() -> None:
    """0.1 + 0.2 is not 0.3 as numbers are kept."""
    for rows in ([(0.1, 0.1), (0.2, 1.0), (1.2, 1.0)], [(0.1, 0.2), (0.3, 0.4)]):
        settings = [{"replica": 0, "at": at, "for": seconds} for at, seconds in rows]
        made = failures_of(settings, 1)
        jobs = Jobs([(0.0, 3, 4)])
        dispatcher, _ = whole([scheduler()], jobs, RoundRobin(), Constant(), failures=made)
        assert dispatcher.retries[0] == 1 and len(dispatcher.states.down()[0]) == 1


def test_a_router_cannot_name_a_replica_that_is_down() -> None:
    class Faithful(Router):
        """The replica that it saw first."""

        first: Replica | None = None

        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            self.first = self.first or replicas[0]
            return self.first

    jobs = Jobs([(0.0, 3, 4), (2.0, 3, 4)])
    schedulers = [scheduler(), scheduler()]
    with pytest.raises(PagedsimError, match=r"Faithful.route gave .*: must be one of the replicas"):
        served(schedulers, jobs, Faithful(), Constant(), failures=ListedOutages({0: [(1.5, 9.0)]}))


class Same(Jobs):
    """Prompts of the same tokens."""

    def requests(self) -> Iterator[tuple[Request, int]]:
        for request, output in super().requests():
            tokens = range(request.prompt_len)
            yield Request(request.id, tokens, arrival=request.arrival), output


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failed_replica_restarts_with_an_empty_cache(ahead: bool) -> None:
    """The same prompt is found in the cache before it dies, and not after."""
    kind: dict[str, Any] = {"memory": "prefix", "batching": "unified", "async_scheduling": ahead}
    jobs = Same([(0.0, 16, 2), (10.0, 16, 2), (20.0, 16, 2)])
    requests, _ = served(
        [scheduler(**kind)],
        jobs,
        RoundRobin(),
        Constant(),
        failures=ListedOutages({0: [(15.0, 1.0)]}),
    )
    assert requests["cached_tokens"].to_pylist() == [0, 12, 0]


def test_failures_by_chance_are_of_the_seed_and_each_replicas_own() -> None:
    def first(index: int, seed: int) -> list[tuple[float, float]]:
        outages = RandomOutages(100.0, 10.0).of(index, seed)
        return [next(outages) for _ in range(2000)]

    assert first(0, 1) == first(0, 1)
    assert first(0, 1) != first(1, 1)
    assert first(0, 1) != first(0, 2)
    mine = first(0, 1)
    ups = [mine[0][0], *(b[0] - a[0] - a[1] for a, b in pairwise(mine))]
    assert min(ups) > 0
    assert sum(ups) / len(ups) == pytest.approx(100, rel=0.1)
    assert sum(seconds for _, seconds in mine) / len(mine) == pytest.approx(10, rel=0.1)


class OnlyFirst(Router):
    """Only request 0 is ever served."""

    holds = True

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica | None:
        return replicas[0] if request.id == 0 else None


def test_a_run_that_only_fails_is_ended() -> None:
    """Failures continue for ever, and no request is served."""
    with pytest.raises(PagedsimError, match=r"1 at the router \(OnlyFirst returned no replica\)"):
        jobs = Jobs([(0.0, 3, 4), (0.0, 3, 4)])
        served([scheduler()], jobs, OnlyFirst(), failures=RandomOutages(10.0, 1.0))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (3, "failures=3 | a list, such as"),
        ([{"replica": 0, "at": 1}], "failures[0]={'replica': 0, 'at': 1} | must have replica, at"),
        ([{"replica": 2, "at": 1, "for": 1}], "failures[0].replica=2 | a whole number"),
        ([{"replica": 0, "at": 1, "for": 0}], "failures[0].for=0 | above 0"),
        (
            [{"replica": 0, "at": 1, "for": 5}, {"replica": 0, "at": 4, "for": 5}],
            "failures | replica 0 dies at 4 s | down from 1 to 6 s",
        ),
        ({"mean_between": 1}, "mean_repair"),
        ({"mean_between": 0, "mean_repair": 1}, "failures.mean_between=0 | above"),
        ({"mean_between": 1, "mean_repair": 1, "what": 1}, "what"),
    ],
)
def test_bad_settings_are_one_line(settings: Any, named: str) -> None:
    refusal(lambda: failures_of(settings, 2), named)
