"""Queueing theory of one server that decodes token by token: where there is a formula, it agrees.

tests/fleet/test_queueing.py has the laws of many servers.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy
from tests.core.odd_policies import ShortestRemaining
from tests.fleet.test_queueing import SEEDS, agrees
from tests.sim.harness import Constant, Jobs, run

STEP = 0.01
"""Seconds a token: a request of n tokens occupies the server for n steps."""
TOKENS = 40
"""Mean length of an output."""
SQUARES = {"fixed": 1.0, "geometric": 2 - 1 / TOKENS}
"""Second moments of the lengths, in units of the mean squared."""


def served(seed: int, load: float, outputs: str, count: int, policy: Policy | str) -> list[float]:
    """Mean time in the queue and in all, without the first tenth, which found an empty server.

    Poisson arrivals of requests whose service takes TOKENS steps on average, one at a time.
    """
    random = np.random.default_rng(seed)
    fixed = outputs == "fixed"
    tokens = np.full(count, TOKENS) if fixed else random.geometric(1 / TOKENS, count)
    arrivals = random.exponential(TOKENS * STEP / load, count).cumsum()
    jobs = Jobs([(float(a), 1, int(n)) for a, n in zip(arrivals, tokens, strict=True)])
    memory = make_memory(blocks=4096, block_size=16)
    requests, _ = run(
        make_scheduler(memory=memory, policy=policy, max_seqs=1), jobs, Constant(STEP)
    )
    arrived = requests["arrival"].to_numpy()
    spent: list[NDArray[np.float64]] = [
        requests[name].to_numpy() - arrived for name in ("scheduled", "finished")
    ]
    return [float(one[count // 10 :].mean()) for one in spent]


@pytest.mark.parametrize(
    ("outputs", "load", "count"),
    [("fixed", 0.5, 1000), pytest.param("geometric", 0.7, 2500, marks=pytest.mark.slow)],
)
def test_waiting_time_is_pollaczek_and_khinchines(outputs: str, load: float, count: int) -> None:
    """M/D/1 with fixed lengths; with geometric ones M/M/1, but for the length of a step."""
    expected = load * SQUARES[outputs] * TOKENS * STEP / (2 * (1 - load))
    agrees((served(seed, load, outputs, count, "fcfs")[0] for seed in SEEDS), expected)


@pytest.mark.parametrize("seed", range(2))
def test_shortest_remaining_first_has_the_least_mean(seed: int) -> None:
    policies = (ShortestRemaining(displace=True), "fcfs")
    shortest, first = (served(seed, 0.8, "geometric", 600, policy)[1] for policy in policies)
    assert shortest < first
