"""Queueing theory of one server that decodes token by token: where there is a formula, it agrees.

tests/cluster/test_queueing.py has the laws of many servers.
"""

from __future__ import annotations

import numpy as np

from pagedsim.build import make_memory, make_scheduler
from tests.cluster.test_queueing import SEEDS, agrees
from tests.sim.harness import Constant, Jobs, run

STEP = 0.01
"""Seconds a token: a request of n tokens occupies the server for n steps."""
TOKENS = 40


def wait(seed: int, load: float, count: int = 1000) -> float:
    """Mean time in the queue, without the first tenth, which found an empty server.

    Poisson arrivals of requests whose service takes TOKENS steps, one at a time.
    """
    arrivals = np.random.default_rng(seed).exponential(TOKENS * STEP / load, count).cumsum()
    jobs = Jobs([(float(at), 1, TOKENS) for at in arrivals])
    memory = make_memory(blocks=4096, block_size=16)
    requests, _ = run(make_scheduler(memory=memory, max_seqs=1), jobs, Constant(STEP))
    queued = requests["scheduled"].to_numpy() - requests["arrival"].to_numpy()
    return float(queued[count // 10 :].mean())


def test_waiting_time_follows_the_pollaczek_khinchine_formula() -> None:
    """M/D/1, whose service times have no variance."""
    load = 0.5
    expected = load * TOKENS * STEP / (2 * (1 - load))
    agrees((wait(seed, load) for seed in SEEDS), expected)
