"""Queueing theory of fleets: where there is a formula, the fleet agrees with it.

Service is exponential to the last bit: a request is one step, which takes as long as was drawn for
it. Times and lines are in units of the mean service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import factorial, sqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Scheduler, StepPlan
from pagedsim.policies.routing.router import Router
from pagedsim.policies.routing.simple import Central, LeastRequests, PowerOfTwo, RoundRobin
from tests.cluster.fleets import served
from tests.sim.harness import Constant, Jobs

Floats = NDArray[np.float64]
SEEDS = range(12)
T_999 = 4.437
"""Student's t for 11 degrees of freedom, both sides, 99.9 %."""


@dataclass
class Drawn(Constant):
    """A step takes what was drawn for the one request in it."""

    each: Floats = field(default_factory=lambda: np.empty(0))

    def step_seconds(self, plan: StepPlan) -> float:
        return float(self.each[int(plan.chunks[0].request.id)])


def one_at_a_time() -> Scheduler:
    """A server of one request at a time, in order of arrival."""
    return make_scheduler(memory=make_memory(blocks=8, block_size=16), max_seqs=1)


def interval(values: Iterable[float]) -> tuple[float, float]:
    """The mean of one value for each seed, and half the width of its interval of 99.9 %."""
    found = np.fromiter(values, dtype=np.float64)
    assert len(found) == len(SEEDS), "T_999 is for so many seeds"
    return float(found.mean()), float(T_999 * found.std(ddof=1) / sqrt(len(found)))


def agrees(values: Iterable[float], expected: float, width: float = 0.3) -> None:
    """Assert that the interval holds what theory says, and is no wider than this part of it."""
    found, half = interval(values)
    assert abs(found - expected) < half, f"{found:.4g} ± {half:.2g}, expected {expected:.4g}"
    assert half < width * expected, "an interval so wide says nothing"


def steady(times: Floats) -> float:
    """The mean without the first fifth, which found empty servers."""
    return float(times[len(times) // 5 :].mean())


def table(
    router: Router, servers: int, load: float, seed: int, count: int, **more: Any
) -> pa.Table:
    """Requests of Poisson arrivals and exponential service."""
    random = np.random.default_rng(seed)
    arrivals = random.exponential(1 / (servers * load), count).cumsum()
    service = random.exponential(1.0, count)
    jobs = Jobs([(float(at), 1, 1) for at in arrivals])
    fleet = [one_at_a_time() for _ in range(servers)]
    requests, _ = served(fleet, jobs, router, Drawn(each=service), **more)
    assert requests["state"].unique().to_pylist() == ["finished"]
    return requests


def wait(*case: Any, **more: Any) -> float:
    """Mean time from arrival to service."""
    requests = table(*case, **more)
    return steady(requests["scheduled"].to_numpy() - requests["arrival"].to_numpy())


# -- many servers ----------------------------------------------------------------------------------


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


def power_of(choices: int, load: float) -> float:
    """Mean wait with infinitely many servers, of which so many are looked at: Mitzenmacher 2001,
    the fixed point of his differential equations."""
    powers = ((choices**i - choices) / (choices - 1) for i in range(2, 12))
    return float(sum(load**power for power in powers))


ROUTERS: dict[str, Callable[[int], Router]] = {
    "central queue": lambda seed: Central(),
    "round robin": lambda seed: RoundRobin(),
    "two choices": lambda seed: PowerOfTwo(2, seed),
}


@pytest.mark.parametrize(
    ("router", "servers", "load", "expected", "count"),
    [
        ("central queue", 3, 0.7, erlang_c(3, 0.7), 1500),
        ("round robin", 3, 0.7, erlang_arrivals(3, 0.7), 1500),
        ("two choices", 50, 0.7, power_of(2, 0.7), 1000),
    ],
)
def test_waits_are_those_of_theory(
    router: str, servers: int, load: float, expected: float, count: int
) -> None:
    waits = (wait(ROUTERS[router](seed), servers, load, seed, count) for seed in SEEDS)
    agrees(waits, expected)


# -- old counts: Mitzenmacher, How Useful Is Old Information, IEEE TPDS 2000 -----------------------

# All counts are looked at again when the first request arrives after `staleness`. Until the next
# look they say the same, so that `least_requests` sends all requests to one replica: the herd.


@pytest.mark.slow
def test_old_counts_turn_the_best_router_into_one_worse_than_chance() -> None:
    """The wait grows with the age of the counts, from less than that of M/M/1 to more."""
    load = 0.7
    waits = [
        np.array([wait(LeastRequests(), 8, load, seed, 800, staleness=age) for seed in SEEDS])
        for age in (0.0, 0.4, 1.5, 6.0)
    ]
    for fresher, older in pairwise(waits):  # the same arrivals and services by seed
        longer, half = interval(older - fresher)
        assert longer - half > 0
    chance = load / (1 - load)
    (fresh, fresh_half), (old, old_half) = interval(waits[0]), interval(waits[-1])
    assert fresh + fresh_half < chance < old - old_half
