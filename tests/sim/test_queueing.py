"""Queueing theory: where there is a formula, the simulator agrees with it."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Scheduler
from tests.core.odd_policies import ShortestRemaining
from tests.sim.harness import Constant, Jobs, run

STEP = 0.01
"""Seconds a token: a request of n tokens occupies the server for n steps."""

TOKENS = 40
"""Mean length of an output."""

SHORT, LONG = 10, 200
LONG_PART = (TOKENS - SHORT) / (LONG - SHORT)
"""Part of the outputs that are long, so that the mean length is TOKENS."""

SEEDS = range(12)
T_999 = 4.437
"""Student's t for 11 degrees of freedom, both sides, 99.9 %."""


def one_at_a_time(policy: Policy | str = "fcfs") -> Scheduler:
    """A single server: one seat, and memory for it."""
    return make_scheduler(memory=make_memory(blocks=4096, block_size=16), policy=policy, max_seqs=1)


LENGTHS: dict[str, Callable[[np.random.Generator, int], NDArray[np.int64]]] = {
    "fixed": lambda random, count: np.full(count, TOKENS),
    "geometric": lambda random, count: random.geometric(1 / TOKENS, count),
    "short or long": lambda random, count: np.where(
        random.random(count) < LONG_PART, LONG, SHORT
    ).astype(np.int64),
}
"""Output lengths by their distribution, each with a mean of TOKENS."""


def jobs(seed: int, load: float, outputs: str, count: int = 2500) -> Jobs:
    """Poisson arrivals of requests whose service takes TOKENS steps on average."""
    random = np.random.default_rng(seed)
    tokens = LENGTHS[outputs](random, count)
    arrivals = random.exponential(TOKENS * STEP / load, count).cumsum()
    return Jobs([(float(a), 1, int(n)) for a, n in zip(arrivals, tokens, strict=True)])


def waits(seed: int, load: float, outputs: str, count: int) -> float:
    """Mean time in the queue, without the first tenth, which found an empty server."""
    requests, _ = run(one_at_a_time(), jobs(seed, load, outputs, count), Constant(STEP))
    queued: NDArray[np.float64] = requests["scheduled"].to_numpy() - requests["arrival"].to_numpy()
    return float(queued[len(queued) // 10 :].mean())


SQUARES = {
    "fixed": 1.0,
    "geometric": 2 - 1 / TOKENS,
    "short or long": (SHORT**2 * (1 - LONG_PART) + LONG**2 * LONG_PART) / TOKENS**2,
}
"""Second moments of the lengths, in units of the mean squared."""


@pytest.mark.parametrize(
    ("outputs", "load", "count"),
    [
        ("fixed", 0.5, 1000),
        pytest.param("geometric", 0.7, 2500, marks=pytest.mark.slow),
        pytest.param("short or long", 0.7, 30_000, marks=pytest.mark.slow),
    ],
)
def test_waiting_time_is_pollaczek_and_khinchines(outputs: str, load: float, count: int) -> None:
    """M/D/1 with fixed lengths, M/G/1 with two lengths; with geometric ones M/M/1, but for the
    length of a step."""
    found = np.array([waits(seed, load, outputs, count) for seed in SEEDS])
    service = TOKENS * STEP
    expected = load / service * SQUARES[outputs] * service**2 / (2 * (1 - load))
    half_width = T_999 * found.std(ddof=1) / sqrt(len(found))
    assert abs(found.mean() - expected) < half_width
    assert half_width < 0.3 * expected, "an interval so wide says nothing"


@pytest.mark.parametrize("seed", range(2))
def test_shortest_remaining_first_has_the_least_mean(seed: int) -> None:
    work = jobs(seed, 0.8, "geometric", count=1000)
    means = {}
    for name, policy in (("fcfs", "fcfs"), ("srpt", ShortestRemaining(displace=True))):
        requests, _ = run(one_at_a_time(policy), work, Constant(STEP))
        means[name] = float(
            np.mean(requests["finished"].to_numpy() - requests["arrival"].to_numpy())
        )
    assert means["srpt"] < means["fcfs"]
