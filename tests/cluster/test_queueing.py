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
from pagedsim.cluster.failures import RandomOutages
from pagedsim.cluster.link import Network
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
    """A step takes what was drawn for the one request in it, by its stage."""

    by_totals = False  # the time of a decode depends on which request it is

    each: Floats = field(default_factory=lambda: np.empty(0))
    decode: Floats = field(default_factory=lambda: np.empty(0))

    def step_seconds(self, plan: StepPlan) -> float:
        if plan.chunks:
            return float(self.each[int(plan.chunks[0].request.id)])
        return float(self.decode[int(plan.decodes[0].id)])


def one_at_a_time(blocks: int = 8) -> Scheduler:
    """A server of one request at a time, in order of arrival."""
    return make_scheduler(memory=make_memory(blocks=blocks, block_size=16), max_seqs=1)


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


# -- prefill and decode apart ----------------------------------------------------------------------

# A network of two stations in Jackson's product form (1957). A request is one step at a replica
# that prefills and one at a replica that decodes, and the transfer between takes no time.
# Departures of M/M/1 are Poisson (Burke 1956), so that the decode station is M/M/c with a mean of
# its own, and at any time the two stations are independent.


@dataclass(frozen=True)
class Tandem:
    """Requests arrive at rate 1."""

    prefill: float
    """Mean service; with one server also the part of time in which it is busy."""
    decode: float
    servers: int
    """Replicas that decode."""

    def decode_idle(self) -> float:
        """Probability that the decode station is empty."""
        offered, full = self.decode, self.decode**self.servers / factorial(self.servers)
        below = sum(offered**n / factorial(n) for n in range(self.servers))
        return 1 / (below + full / (1 - offered / self.servers))

    def decode_sojourn(self) -> float:
        """Mean time at the decode station: M/M/c (Erlang 1917)."""
        load = self.decode / self.servers
        full = self.decode**self.servers / factorial(self.servers) / (1 - load)
        return self.decode + full * self.decode_idle() * load / (1 - load)

    def passage(self, router: Router, seed: int, count: int) -> list[Floats]:
        """When requests arrived, left the prefill station, and left the decode station."""
        random = np.random.default_rng(seed)
        arrivals = random.exponential(1.0, count).cumsum()
        each, decode = (random.exponential(mean, count) for mean in (self.prefill, self.decode))
        requests, _ = served(
            [one_at_a_time(blocks=4096) for _ in range(1 + self.servers)],  # for all that wait
            Jobs([(float(at), 1, 2) for at in arrivals]),
            router,
            Drawn(each=each, decode=decode),
            roles=("prefill", *["decode"] * self.servers),
            network=Network(bandwidth_gb_s=1.0),
        )
        assert requests["state"].unique().to_pylist() == ["finished"]
        return [requests[name].to_numpy() for name in ("arrival", "first_token", "finished")]


def idle(arrived: Floats, left: Floats) -> float:
    """Part of the time without a request at either station, first fifth of arrivals aside."""
    first = len(arrived) // 5
    gaps = np.maximum(arrived[first + 1 :] - np.maximum.accumulate(left)[first:-1], 0)
    return float(gaps.sum() / (arrived[-1] - arrived[first]))


def test_prefill_and_decode_are_stations_in_product_form() -> None:
    tandem, width = Tandem(0.5, 1.5, 3), 0.3
    found = [tandem.passage(Central(), seed, 600) for seed in SEEDS]
    prefill = (steady(between - arrived) for arrived, between, _ in found)
    agrees(prefill, tandem.prefill / (1 - tandem.prefill), width)
    decode = (steady(left - between) for _, between, left in found)
    agrees(decode, tandem.decode_sojourn(), width)
    both_idle = (1 - tandem.prefill) * tandem.decode_idle()
    agrees((idle(arrived, left) for arrived, _, left in found), both_idle, width)


# -- servers that break down -----------------------------------------------------------------------

# The interrupted request is served from its start and keeps its length (preemptive-repeat-
# identical). Failures have rate ξ while the server is up, idle or not; repairs are exponential.


# By Gauss-Laguerre quadrature, which converges fast for means of e^(ξs) with ξ < 1/2.
POINTS, WEIGHTS = np.polynomial.laguerre.laggauss(80)


@dataclass(frozen=True)
class Breaking:
    """A server of exponential service with mean 1, with breakdowns."""

    between: float
    repair: float

    def completion(self) -> tuple[float, float]:
        """First and second moment of the time from the start of a request to its end.

        A service of s is begun anew N times, which is geometric with e^(ξs) - 1 as its mean. Each
        time costs V: an up time that ended before s, and a repair.
        """
        rate, s = 1 / self.between, POINTS
        survives, fails = np.exp(-rate * s), -np.expm1(-rate * s)
        up = 1 / rate - s * survives / fails
        up_square = 2 / rate**2 - (s**2 + 2 * s / rate) * survives / fails
        lost = up + self.repair
        variance = up_square - up**2 + self.repair**2
        times, times_square = fails / survives, fails * (1 + fails) / survives**2
        mean = s + times * lost
        square = s**2 + 2 * s * times * lost + times * variance + times_square * lost**2
        return float(WEIGHTS @ mean), float(WEIGHTS @ square)

    def sojourn(self, load: float) -> float:
        """Mean time from arrival to end with Poisson arrivals.

        M/G/1 with completion times for service. The first request of a busy period finds the
        server down with probability ξ/(λ + ξ + 1/r), and waits for the rest of the repair, which
        is exponential again: a set-up time D of the busy period (Welch 1964), which adds
        (2 E[D] + λ E[D²]) / (2 (1 + λ E[D])).
        """
        first, second = self.completion()
        down = (1 / self.between) / (load + 1 / self.between + 1 / self.repair)
        setup, setup_square = down * self.repair, 2 * down * self.repair**2
        queued = load * second / (2 * (1 - load * first))
        held_up = (2 * setup + load * setup_square) / (2 * (1 + load * setup))
        return queued + held_up + first

    def sojourns(self, load: float, seed: int, count: int) -> Floats:
        """Times from arrival to end."""
        random = np.random.default_rng(seed)
        service = random.exponential(1.0, count)
        arrivals = random.exponential(1 / load, count).cumsum()
        jobs = Jobs([(float(at), 1, 1) for at in arrivals])
        failures = RandomOutages(self.between, self.repair)
        costs = Drawn(each=service)
        requests, _ = served(
            [one_at_a_time()], jobs, RoundRobin(), costs, failures=failures, seed=seed
        )
        assert requests["state"].unique().to_pylist() == ["finished"]
        times: Floats = requests["finished"].to_numpy() - requests["arrival"].to_numpy()
        return times


def test_a_queue_with_breakdowns_is_one_of_completion_times() -> None:
    server, load = Breaking(8.0, 2.0), 0.3
    times = (steady(server.sojourns(load, seed, 1000)) for seed in SEEDS)
    agrees(times, server.sojourn(load))
