"""Queueing theory: where there is a formula, the simulator agrees with it."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request, Scheduler, ServerState
from pagedsim.core.policy import RankChanges
from tests.sim.harness import Constant, Jobs, run

STEP = 0.01
"""Seconds a token: a request of n tokens occupies the server for n steps."""

TOKENS = 40
"""Mean length of an output."""

SEEDS = range(12)
T_999 = 4.437
"""Student's t for 11 degrees of freedom, both sides, 99.9 %."""


class ShortestRemaining(Policy):
    """Preemptive: who has the least left runs."""

    rank_changes: RankChanges = "while running"
    displacing = True

    def rank(self, request: Request, state: ServerState) -> float:
        assert request.predicted_len is not None
        return request.predicted_len - request.generated


def one_at_a_time(policy: Policy | str = "fcfs") -> Scheduler:
    """A single server: one seat, and memory for it."""
    return make_scheduler(memory=make_memory(blocks=4096, block_size=16), policy=policy, max_seqs=1)


def jobs(seed: int, load: float, outputs: str, count: int = 2500) -> Jobs:
    """Poisson arrivals of requests whose service takes TOKENS steps on average."""
    random = np.random.default_rng(seed)
    tokens = np.full(count, TOKENS) if outputs == "fixed" else random.geometric(1 / TOKENS, count)
    arrivals = random.exponential(TOKENS * STEP / load, count).cumsum()
    return Jobs([(float(a), 1, int(n)) for a, n in zip(arrivals, tokens, strict=True)])


def waits(seed: int, load: float, outputs: str) -> float:
    """Mean time in the queue, without the first tenth, which found an empty server."""
    requests, _ = run(one_at_a_time(), jobs(seed, load, outputs), Constant(STEP))
    queued: NDArray[np.float64] = requests["scheduled"].to_numpy() - requests["arrival"].to_numpy()
    return float(queued[len(queued) // 10 :].mean())


@pytest.mark.parametrize(
    ("outputs", "second_moment"),
    [("fixed", 1.0), pytest.param("geometric", 2 - 1 / TOKENS, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("load", [pytest.param(0.5, marks=pytest.mark.slow), 0.7])
def test_waiting_time_is_pollaczek_and_khinchines(
    load: float, outputs: str, second_moment: float
) -> None:
    """M/D/1 with fixed lengths; with geometric ones M/M/1, but for the length of a step."""
    found = np.array([waits(seed, load, outputs) for seed in SEEDS])
    service = TOKENS * STEP
    expected = load / service * second_moment * service**2 / (2 * (1 - load))
    half_width = T_999 * found.std(ddof=1) / sqrt(len(found))
    assert abs(found.mean() - expected) < half_width
    assert half_width < 0.3 * expected, "an interval so wide says nothing"


@pytest.mark.parametrize("seed", range(5))
def test_shortest_remaining_first_has_the_least_mean(seed: int) -> None:
    work = jobs(seed, 0.8, "geometric", count=1000)
    means = {}
    for name, policy in (("fcfs", "fcfs"), ("srpt", ShortestRemaining())):
        requests, _ = run(one_at_a_time(policy), work, Constant(STEP))
        means[name] = float(
            np.mean(requests["finished"].to_numpy() - requests["arrival"].to_numpy())
        )
    assert means["srpt"] < means["fcfs"]
