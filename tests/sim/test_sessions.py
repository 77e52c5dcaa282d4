"""Requests that are sent once others are answered."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Scheduler
from pagedsim.workload import Sessions, Workload, agents, chat_sessions
from tests.sim.harness import run

FIXED = {"shape": "fixed", "prompt": 8, "output": 4}


def scheduler(blocks: int = 64, **settings: Any) -> Scheduler:
    cpu = settings.pop("cpu_blocks", 0)
    memory = make_memory("prefix", blocks=blocks, block_size=4, cpu_blocks=cpu)
    return make_scheduler(memory=memory, **settings)


def served(made: Workload, **settings: Any) -> pa.Table:
    requests, _ = run(settings.pop("scheduler", None) or scheduler(), made, **settings)  # type: ignore[arg-type]
    return requests


def test_a_turn_arrives_after_the_last_answer_and_the_think_time() -> None:
    made = chat_sessions(sessions=1, arrivals="burst", turns=3, think=10, lengths=FIXED)
    requests = served(made)  # a prefill and three decodes of a second each
    assert requests["arrival"].to_pylist() == [0.0, 14.0, 28.0]
    assert requests["finished"].to_pylist() == [4.0, 18.0, 32.0]


def test_a_turn_finds_its_prompt_and_its_answer_in_the_cache() -> None:
    made = chat_sessions(sessions=1, arrivals="burst", turns=3, lengths=FIXED)
    # 8 + 4 tokens, of which the last was never put into memory: 2 whole blocks of 4. Then 20 + 4.
    assert served(made)["cached_tokens"].to_pylist() == [0, 8, 20]
    longer = {"shape": "fixed", "prompt": 7, "output": 6}  # 12 of 13 tokens: a block of both
    made = chat_sessions(sessions=2, rate=0.01, turns=2, lengths=longer)
    assert served(made)["cached_tokens"].to_pylist() == [0, 12, 0, 12]


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


def test_no_request_arrives_before_its_time() -> None:
    """As where a trace has times of its own, and sessions whose turns lie between each other."""
    turns = Sessions([0, 1, 0, 1], [1, 1, 2, 2], [[], [], [0], [1]], [0, 0, 0, 3])
    made = Workload.of([0.0, 1.0, 50.0, 51.0], 4, [4, 60, 4, 4], turns=turns)
    requests = served(made)
    finished = requests["finished"].to_pylist()
    assert finished[0] < 50 and finished[1] > 51
    assert requests["arrival"].to_pylist() == [0.0, 1.0, 50.0, finished[1] + 3]


def test_each_user_has_one_session_at_a_time() -> None:
    made = chat_sessions(
        sessions=3, arrivals="closed", users=2, think_time=100, turns=2, lengths=FIXED
    )
    requests = served(made)
    arrival, finished = requests["arrival"].to_pylist(), requests["finished"].to_pylist()
    assert arrival[0] == arrival[2] == 0.0
    assert arrival[4] == min(finished[1], finished[3]) + 100
    assert arrival[5] == finished[4]


def test_a_session_continues_after_a_rejected_turn() -> None:
    turns = Sessions([0, 0], [1, 2], [[], [0]], [0, 1])
    made = Workload.of([0.0, 0.0], [4000, 4], 4, turns=turns)
    requests = served(made)
    assert requests["state"].to_pylist() == ["rejected", "finished"]
    assert requests["arrival"].to_pylist() == [0.0, 1.0]
