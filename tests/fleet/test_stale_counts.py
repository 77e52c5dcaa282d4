"""Theory of dispatch by old counts (Mitzenmacher, How Useful Is Old Information, IEEE TPDS 2000).

All counts are looked at again when the first request arrives after `staleness`. Until the next look
they say the same, so that `least_requests` sends every request to the same replica: the herd.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import PagedsimError, Request
from pagedsim.fleet.link import Network
from policies.routing.router import Replica, Replicas, Router
from policies.routing.simple import Central, LeastRequests
from tests.fleet.fleets import served
from tests.fleet.test_theory import shorter_of_two
from tests.fleet.theory import SEEDS, Drawn, Floats, agrees, interval, one_at_a_time
from tests.sim.harness import Constant, Jobs

LONGEST = 50
"""Lines beyond it are cut off in the chain; at the loads below they hardly ever occur."""


def wait(router: Router, servers: int, load: float, staleness: float, seed: int, n: int) -> float:
    """Mean time from arrival to service, without the first fifth, which found empty servers."""
    random = np.random.default_rng(seed)
    arrivals = random.exponential(1 / (servers * load), n).cumsum()
    service = random.exponential(1.0, n)
    requests, _ = served(
        [one_at_a_time() for _ in range(servers)],
        Jobs([(float(at), 1, 1) for at in arrivals]),
        router,
        Drawn(each=service),
        staleness=staleness,
    )
    assert requests["state"].unique().to_pylist() == ["finished"]
    queued: Floats = requests["scheduled"].to_numpy() - requests["arrival"].to_numpy()
    return float(queued[n // 5 :].mean())


def birth_and_death(rate: float, time: float) -> tuple[Floats, Floats]:
    """Transition matrix of an M/M/1 line after `time`, and its integral over that time.

    By the exponential of the generator beside the identity: halved until it is small, summed as
    a series, and squared again.
    """
    size = LONGEST + 1
    flow = np.zeros((2 * size, 2 * size))
    up, down = np.arange(LONGEST), np.arange(1, size)
    flow[up, up + 1], flow[down, down - 1] = rate, 1.0
    flow[range(size), range(size)] = -flow[:size].sum(axis=1)
    flow[range(size), range(size, 2 * size)] = 1.0
    halvings = 12 + int(np.ceil(np.log2(max(time, 1.0))))
    small, term, power = flow * time / 2**halvings, np.eye(2 * size), np.eye(2 * size)
    for order in range(1, 8):
        term = term @ small / order
        power += term
    for _ in range(halvings):
        power = power @ power
    return power[:size, :size], power[:size, size:]


def herd_of_two(load: float, staleness: float) -> float:
    """Mean wait at two servers, from the chain of both lengths at the looks.

    From a look on, the shorter line is M/M/1 with all arrivals and begins with the one that caused
    the look; the other one only empties. After `staleness` both only empty until the next arrival.
    An arrival waits for as many services as there are requests before it (mean service 1).
    """
    rate = 2 * load
    line, stayed = birth_and_death(rate, staleness)
    empties, _ = birth_and_death(0.0, staleness)
    nodes, weights = np.polynomial.laguerre.laggauss(12)
    rests = [birth_and_death(0.0, float(node) / rate)[0] for node in nodes]
    lengths = np.arange(LONGEST + 1.0)
    joined = np.minimum(np.arange(LONGEST + 1) + 1, LONGEST)  # with the arrival at the look
    chance = np.zeros((LONGEST + 1, LONGEST + 1))  # of (shorter line, longer line) at a look
    chance[0, 0] = 1.0
    for _ in range(10_000):
        after = line[joined].T @ chance @ empties
        following = sum(w * rest.T @ after @ rest for w, rest in zip(weights, rests, strict=True))
        following = np.triu(following) + np.tril(following, -1).T
        if np.abs(following - chance).max() < 1e-8:
            break
        chance = following
    shorter = chance.sum(axis=1)
    waits = shorter @ lengths + rate * shorter @ (stayed[joined] @ lengths)
    return float(waits / (1 + rate * staleness))


@pytest.mark.parametrize(
    ("load", "staleness", "count", "width"),
    [
        (0.5, 2.0, 2000, 0.2),
        (0.7, 10.0, 1500, 0.2),
        pytest.param(0.7, 0.5, 20_000, 0.06, marks=pytest.mark.slow),
        pytest.param(0.8, 3.0, 20_000, 0.06, marks=pytest.mark.slow),
    ],
)
def test_waits_of_a_herd_at_two_servers_are_those_of_its_chain(
    load: float, staleness: float, count: int, width: float
) -> None:
    waits = (wait(LeastRequests(), 2, load, staleness, seed, count) for seed in SEEDS)
    agrees(waits, herd_of_two(load, staleness), width)


def test_the_chain_without_staleness_is_that_of_the_shorter_line() -> None:
    assert herd_of_two(0.6, 0.0) == pytest.approx(shorter_of_two(0.6), rel=1e-4)


@pytest.mark.parametrize(
    ("servers", "load", "ages", "count"),
    [
        (8, 0.7, (0.0, 0.4, 1.5, 6.0), 800),
        pytest.param(16, 0.9, (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0), 15_000, marks=pytest.mark.slow),
    ],
)
def test_old_counts_turn_the_best_router_into_one_worse_than_chance(
    servers: int, load: float, ages: tuple[float, ...], count: int
) -> None:
    """The wait grows with the age of the counts, from less than that of M/M/1 to more."""
    waits = [
        np.array([wait(LeastRequests(), servers, load, age, seed, count) for seed in SEEDS])
        for age in ages
    ]
    for fresher, older in pairwise(waits):  # the same arrivals and services by seed
        longer, half = interval(older - fresher)
        assert longer - half > 0
    chance = load / (1 - load)
    fresh, fresh_half = interval(waits[0])
    old, old_half = interval(waits[-1])
    assert fresh + fresh_half < chance < old - old_half


def finished(
    rows: list[tuple[float, int, int]],
    router: Router,
    staleness: float,
    roles: tuple[str, ...] = ("both",),
    **settings: Any,
) -> list[float]:
    """When requests are finished; a step takes a second."""
    units = [
        make_scheduler(memory=make_memory(blocks=64, block_size=4), max_seqs=4, batching="unified")
        for _ in roles
    ]
    jobs = Jobs(rows)
    network = Network(1e9)  # sends at once
    requests, _ = served(
        units, jobs, router, Constant(), roles, staleness=staleness, network=network, **settings
    )
    assert requests["state"].unique().to_pylist() == ["finished"]
    times: list[float] = requests["finished"].to_pylist()
    return times


@pytest.mark.parametrize(
    ("staleness", "starts"),
    [
        (0.0, 4.0),
        (0.5, 4.0),  # old enough at 4 to be looked at again
        (1.5, 4.0),
        (2.0, 4.5),
        (2.5, 5.0),
    ],
)
def test_a_request_held_by_old_counts_is_routed_when_they_are_renewed(
    staleness: float, starts: float
) -> None:
    """At 2.5 one request is seen; it leaves at 4, which is seen `staleness` after 2.5."""
    rows = [(0.0, 3, 4), (2.5, 3, 4)]
    assert finished(rows, Central(slots=1), staleness) == [4.0, starts + 4.0]


def test_counts_are_renewed_in_any_numbers() -> None:
    """(2.1 + 2.0) - 2.1 is less than 2.0 as numbers are kept."""
    [_, last] = finished([(0.0, 3, 4), (2.1, 3, 4)], Central(slots=1), 2.0)
    assert last == pytest.approx(2.1 + 2.0 + 4.0)


def test_a_request_held_before_decode_is_routed_when_counts_are_renewed() -> None:
    """The decode replica is seen full at 3.5; it is empty from 5 on, which is seen at 6."""
    rows = [(0.0, 3, 5), (2.5, 3, 2)]
    assert finished(rows, Central(slots=1), 2.5, ("prefill", "decode")) == [5.0, 7.0]


class ShortFirst(Router):
    """Prompts of more than 3 tokens are held back while replica 0 has requests."""

    holds = True

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica | None:
        return None if replicas[0].requests and request.prompt_len > 3 else replicas[0]


def test_a_request_held_after_the_last_departure_is_routed_when_counts_are_renewed() -> None:
    """The counts of 4.5 have request 1, which leaves at 6; they are renewed at 8.5."""
    rows = [(0.0, 3, 4), (3.5, 3, 2), (4.5, 3, 1), (6.5, 4, 1)]
    assert finished(rows, ShortFirst(), 4.0) == [4.0, 6.0, 6.0, 9.5]


class Never(Router):
    """Only the first request is served; counts are read each time."""

    holds = True

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica | None:
        return None if replicas[0].requests or request.id else replicas[0]


def test_renewals_end_where_the_router_holds_a_request_for_ever() -> None:
    with pytest.raises(PagedsimError, match=r"1 at the router \(Never returned no replica\)"):
        finished([(0.0, 3, 4), (2.5, 3, 4)], Never(), 2.0)


def test_a_request_is_asked_about_again_when_the_first_of_several_counts_is_renewed() -> None:
    """Request 3 finds replica 1 as it was at 1.6 s and replica 0 as it was at 2.5 s, when replica 1
    is free. That shows at 2.6 s."""

    class Own(Router):
        holds = True

        def route(self, request: Request, replicas: Replicas, now: float) -> Replica | None:
            own = int(request.id) % 2
            return next(
                (one for one in (replicas[own], replicas[1 - own]) if not one.requests), None
            )

    jobs = Jobs([(0.0, 4, 20), (0.5, 4, 1), (1.2, 4, 1), (1.6, 4, 1)])
    made = [
        make_scheduler(memory=make_memory(blocks=64, block_size=4), max_seqs=4) for _ in range(2)
    ]
    requests, _ = served(made, jobs, Own(), Constant(), staleness=1.0)
    assert requests["replica"].to_pylist() == [0, 1, 1, 1]
    assert requests["first_token"].to_pylist()[3] == pytest.approx(3.6)
