"""Queueing theory of a server that breaks down, and serves the interrupted request from its start.

The request keeps its length (preemptive-repeat-identical). Failures have rate ξ while the server is
up, idle or not; repairs are exponential. Times are in units of the mean service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest

from pagedsim.fleet.failures import RandomOutages as Breakdowns
from policies.routing.simple import RoundRobin
from tests.fleet.fleets import served
from tests.fleet.theory import SEEDS, Drawn, Floats, agrees, one_at_a_time
from tests.sim.harness import Jobs

Draw = Callable[[np.random.Generator, int], Floats]


@dataclass(frozen=True)
class Service:
    """A distribution of service times with mean 1."""

    draw: Draw
    points: Floats
    """Where its density stands, so that a mean over it is a sum."""
    weights: Floats

    def mean(self, of: Floats) -> float:
        return float(self.weights @ of)


def exponential() -> Service:
    """By Gauss-Laguerre quadrature, which converges fast for means of e^(ξs) with ξ < 1/2."""
    points, weights = np.polynomial.laguerre.laggauss(80)
    return Service(lambda random, count: random.exponential(1.0, count), points, weights)


def fixed() -> Service:
    return Service(lambda random, count: np.ones(count), np.ones(1), np.ones(1))


SERVICES = {"exponential": exponential(), "fixed": fixed()}


@dataclass(frozen=True)
class Breaking:
    """A server with breakdowns."""

    service: Service
    between: float
    repair: float

    def completion(self) -> tuple[float, float]:
        """First and second moment of the time from the start of a request to its end.

        A service of s is begun anew N times, which is geometric with e^(ξs) - 1 as its mean. Each
        time costs V: an up time that ended before s, and a repair.
        """
        rate, s = 1 / self.between, self.service.points
        survives, fails = np.exp(-rate * s), -np.expm1(-rate * s)
        up = 1 / rate - s * survives / fails
        up_square = 2 / rate**2 - (s**2 + 2 * s / rate) * survives / fails
        lost = up + self.repair
        variance = up_square - up**2 + self.repair**2
        times, times_square = fails / survives, fails * (1 + fails) / survives**2
        mean = s + times * lost
        square = s**2 + 2 * s * times * lost + times * variance + times_square * lost**2
        return self.service.mean(mean), self.service.mean(square)

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


def sojourns(server: Breaking, load: float, seed: int, count: int) -> Floats:
    """Times from arrival to end. With a load of infinity a request arrives when one ends."""
    random = np.random.default_rng(seed)
    service = server.service.draw(random, count)
    closed = load == inf
    gaps = np.zeros(count) if closed else random.exponential(1 / load, count)
    jobs = Jobs(
        [(float(at), 1, 1) for at in gaps.cumsum()],
        mode="closed" if closed else "open",
        users=1 if closed else None,
    )
    failures = Breakdowns(server.between, server.repair)
    requests, _ = served(
        [one_at_a_time()], jobs, RoundRobin(), Drawn(each=service), failures=failures, seed=seed
    )
    assert requests["state"].unique().to_pylist() == ["finished"]
    times: Floats = requests["finished"].to_numpy() - requests["arrival"].to_numpy()
    return times


@pytest.mark.parametrize(
    ("service", "between", "repair", "count", "width"),
    [
        ("fixed", 2.0, 1.0, 1000, 0.1),
        ("exponential", 5.0, 2.0, 2000, 0.15),
        pytest.param("fixed", 0.7, 0.5, 4_000, 0.03, marks=pytest.mark.slow),
        pytest.param("exponential", 5.0, 2.0, 20_000, 0.05, marks=pytest.mark.slow),
    ],
)
def test_a_request_completes_in_the_mean_as_renewals_say(
    service: str, between: float, repair: float, count: int, width: float
) -> None:
    """One request at a time: E[C] = (1/ξ + E[R]) (E[e^(ξS)] - 1)."""
    server = Breaking(SERVICES[service], between, repair)
    points = server.service.points
    expected = (between + repair) * (server.service.mean(np.exp(points / between)) - 1)
    assert expected == pytest.approx(server.completion()[0])
    agrees((sojourns(server, inf, seed, count).mean() for seed in SEEDS), expected, width)


@pytest.mark.parametrize(
    ("service", "between", "repair", "load", "count", "width"),
    [
        ("fixed", 4.0, 4.0, 0.3, 1500, 0.3),
        ("exponential", 8.0, 2.0, 0.4, 2000, 0.3),
        ("fixed", 10.0, 30.0, 0.05, 1000, 0.25),
        pytest.param("fixed", 4.0, 4.0, 0.3, 30_000, 0.12, marks=pytest.mark.slow),
        pytest.param("exponential", 8.0, 2.0, 0.5, 20_000, 0.15, marks=pytest.mark.slow),
    ],
)
def test_a_queue_with_breakdowns_is_one_of_completion_times(
    service: str, between: float, repair: float, load: float, count: int, width: float
) -> None:
    server = Breaking(SERVICES[service], between, repair)
    times = (sojourns(server, load, seed, count)[count // 5 :].mean() for seed in SEEDS)
    agrees(times, server.sojourn(load), width)
