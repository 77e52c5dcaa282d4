"""Queueing theory of many servers: where there is a formula, the fleet agrees with it.

Service is exponential to the last bit: a request is one step, which takes as long as was drawn for
it. Lines are in units of the mean service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import factorial

import numpy as np
import pyarrow as pa
import pytest

from policies.routing.router import Router
from policies.routing.simple import Central, LeastRequests, PowerOfTwo, RoundRobin, Uniform
from tests.fleet.fleets import served
from tests.fleet.theory import SEEDS, Drawn, Floats, agrees, interval, one_at_a_time
from tests.sim.harness import Jobs


def wait(router: Router, servers: int, load: float, seed: int, count: int) -> float:
    """Mean time from arrival to service, without the first fifth, which found empty servers."""
    requests = table(router, servers, load, seed, count)
    queued: Floats = requests["scheduled"].to_numpy() - requests["arrival"].to_numpy()
    return float(queued[count // 5 :].mean())


def table(router: Router, servers: int, load: float, seed: int, count: int) -> pa.Table:
    """Requests of Poisson arrivals and exponential service, by request."""
    random = np.random.default_rng(seed)
    arrivals = random.exponential(1 / (servers * load), count).cumsum()
    service = random.exponential(1.0, count)
    jobs = Jobs([(float(at), 1, 1) for at in arrivals])
    fleet = [one_at_a_time() for _ in range(servers)]
    requests, _ = served(fleet, jobs, router, Drawn(each=service))
    assert requests["state"].unique().to_pylist() == ["finished"]
    return requests


def erlang_c(servers: int, load: float) -> float:
    """Mean wait of M/M/N: Erlang 1917."""
    offered = servers * load
    full = offered**servers / factorial(servers) / (1 - load)
    waits = full / (sum(offered**n / factorial(n) for n in range(servers)) + full)
    return waits / (servers * (1 - load))


def erlang_arrivals(servers: int, load: float) -> float:
    """Mean wait of E_N/M/1, which is what round robin makes of each server: σ/(1 - σ), with the
    root σ < 1 of σ = A*(1 - σ) (Kleinrock, Queueing Systems I, 6.4)."""
    rate, sigma = servers * load, 0.0
    for _ in range(10_000):
        sigma = (rate / (rate + 1 - sigma)) ** servers
    return sigma / (1 - sigma)


def shorter_of_two(load: float, longest: int = 60) -> float:
    """Mean wait where the shorter of two lines is joined: the chain of both lengths, cut where it
    hardly ever comes, and solved. No closed form is short (Kingman, Two Similar Queues in Parallel,
    1961; Flatto & McKean 1977)."""
    states = [(short, long) for long in range(longest + 1) for short in range(long + 1)]
    place = {state: row for row, state in enumerate(states)}
    flow = np.zeros((len(states), len(states)))

    def goes(state: tuple[int, int], to: tuple[int, int], rate: float) -> None:
        row, column = place[state], place[min(to), max(to)]
        flow[row, column] += rate
        flow[row, row] -= rate

    for short, long in states:
        if short < longest:
            goes((short, long), (short + 1, long), 2 * load)
        if short:
            goes((short, long), (short - 1, long), 1.0)
        if long:
            goes((short, long), (short, long - 1), 1.0)
    balance = flow.T
    balance[0] = 1.0
    chance = np.linalg.solve(balance, np.eye(len(states))[0])
    return float(sum(part * short for part, (short, _) in zip(chance, states, strict=True)))


def power_of(choices: int, load: float) -> float:
    """Mean wait with infinitely many servers, of which so many are looked at: Mitzenmacher 2001,
    the fixed point of his differential equations."""
    powers = ((choices**i - choices) / (choices - 1) for i in range(2, 12))
    return float(sum(load**power for power in powers))


@dataclass(frozen=True)
class Case:
    """A fleet whose mean wait is known."""

    name: str
    router: Callable[[int], Router]
    servers: int
    load: float
    expected: float
    count: int = 1_500


QUICK = [
    Case("central queue", lambda seed: Central(), 3, 0.7, erlang_c(3, 0.7)),
    Case("chance", lambda seed: Uniform(seed), 3, 0.5, 1.0),
    Case("round robin", lambda seed: RoundRobin(), 3, 0.7, erlang_arrivals(3, 0.7)),
    Case("shorter of two", lambda seed: LeastRequests(), 2, 0.7, shorter_of_two(0.7)),
    Case("two choices", lambda seed: PowerOfTwo(2, seed), 50, 0.7, power_of(2, 0.7)),
]
LONG = [
    Case("central queue", lambda seed: Central(), 16, 0.95, erlang_c(16, 0.95), 40_000),
    Case("chance", lambda seed: Uniform(seed), 8, 0.8, 4.0, 20_000),
    Case("round robin", lambda seed: RoundRobin(), 8, 0.9, erlang_arrivals(8, 0.9), 20_000),
    Case("shorter of two", lambda seed: LeastRequests(), 2, 0.9, shorter_of_two(0.9), 20_000),
    Case("two choices", lambda seed: PowerOfTwo(2, seed), 300, 0.7, power_of(2, 0.7), 20_000),
    Case("three choices", lambda seed: PowerOfTwo(3, seed), 300, 0.8, power_of(3, 0.8), 20_000),
]


def waits(case: Case) -> list[float]:
    """Mean wait by seed."""
    return [wait(case.router(seed), case.servers, case.load, seed, case.count) for seed in SEEDS]


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LONG)],
    ids=lambda case: f"{case.name}-{case.servers}-{case.load}",
)
def test_waits_are_those_of_theory(case: Case) -> None:
    agrees(waits(case), case.expected)


@pytest.mark.slow
def test_the_shortest_line_lies_between_one_line_and_turns() -> None:
    """No line of each server's own is shorter than the common one, and none is shorter in the
    mean than where all join the shortest (Winston 1977). At high loads the two come together
    (Foschini & Salz 1978): as a part of the wait, what lies between them vanishes."""
    apart = []
    for load, count in ((0.6, 10_000), (0.95, 40_000)):
        routers = (Central, LeastRequests, RoundRobin)
        common, shortest, turns = (
            interval(waits(Case("", lambda seed, made=made: made(), 4, load, 0.0, count)))[0]  # type: ignore[misc]
            for made in routers
        )
        assert common < shortest < turns
        apart.append(shortest / common - 1)
    assert apart[1] < 0.25 * apart[0]


def tails(servers: int, requests: pa.Table) -> Floats:
    """Part of servers with at least 0, 1, 2, 3 requests: a mean over the time from the first fifth
    of arrivals to the last one."""
    arrived, finished, place = (
        requests[name].to_numpy() for name in ("arrival", "finished", "replica")
    )
    start, end = arrived[len(arrived) // 5], arrived[-1]
    spent = np.zeros(4)
    for server in range(servers):
        here = place == server
        times = np.concatenate([arrived[here], finished[here]])
        change = np.repeat([1, -1], here.sum())
        order = times.argsort()
        length = np.concatenate([[0], change[order].cumsum()])
        lasts = np.diff(np.concatenate([[start], times[order].clip(start, end), [end]]))
        spent += [lasts[length >= k].sum() for k in range(4)]
    return spent / (servers * (end - start))


@pytest.mark.parametrize(
    ("choices", "servers", "load", "count", "width"),
    [
        (2, 100, 0.7, 3_000, 0.25),
        pytest.param(2, 500, 0.8, 20_000, 0.15, marks=pytest.mark.slow),
        pytest.param(3, 500, 0.7, 20_000, 0.25, marks=pytest.mark.slow),
    ],
)
def test_lines_are_as_short_as_a_choice_makes_them(
    choices: int, servers: int, load: float, count: int, width: float
) -> None:
    """With d choices and many servers, a server has at least k requests with probability
    ρ^((d^k - 1)/(d - 1)); for d = 2 that is ρ^(2^k - 1) (Vvedenskaya et al. 1996)."""
    parts = [
        tails(servers, table(PowerOfTwo(choices, seed), servers, load, seed, count))
        for seed in SEEDS
    ]
    for least in (1, 2, 3):
        expected = load ** ((choices**least - 1) / (choices - 1))
        agrees((part[least] for part in parts), expected, width)
