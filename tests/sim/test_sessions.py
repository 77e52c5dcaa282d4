"""Requests that are sent once others are answered."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Scheduler
from pagedsim.workload import Workload, agents, chat_sessions
from tests.sim.harness import run

FIXED = {"shape": "fixed", "prompt": 8, "output": 4}


def scheduler(blocks: int = 64, **settings: Any) -> Scheduler:
    cpu = settings.pop("cpu_blocks", 0)
    memory = make_memory("prefix", blocks=blocks, block_size=4, cpu_blocks=cpu)
    return make_scheduler(memory=memory, **settings)


def served(made: Workload, **settings: Any) -> pa.Table:
    requests, _ = run(settings.pop("scheduler", None) or scheduler(), made, **settings)  # type: ignore[arg-type]
    return requests


def test_two_requests_that_continue_one_answer_both_hit_it() -> None:
    kind = {"shape": "tree", "breadth": 2, "depth": 2, "keep": 2, "lengths": FIXED}
    made = agents(programs={"one": kind}, sessions=1, arrivals="burst")
    requests = served(made, scheduler=scheduler(batching="one_by_one"))
    assert requests["cached_tokens"].to_pylist() == [0, 4, 8, 16, 8, 16, 20]


def test_a_request_waits_for_all_its_predecessors() -> None:
    kind = {"shape": "map_reduce", "width": 3, "tool": 2, "lengths": FIXED}
    made = agents(programs={"one": kind}, sessions=1, arrivals="burst")
    requests = served(made, scheduler=scheduler(max_seqs=2))
    finished = requests["finished"].to_pylist()
    assert len(set(finished[:3])) > 1
    assert requests["arrival"].to_pylist() == [0.0, 0.0, 0.0, max(finished[:3]) + 2]


def test_each_user_has_one_session_at_a_time() -> None:
    made = chat_sessions(
        sessions=3, arrivals="closed", users=2, think_time=100, turns=2, lengths=FIXED
    )
    requests = served(made)
    arrival, finished = requests["arrival"].to_pylist(), requests["finished"].to_pylist()
    assert arrival[0] == arrival[2] == 0.0
    assert arrival[4] == min(finished[1], finished[3]) + 100
    assert arrival[5] == finished[4]
