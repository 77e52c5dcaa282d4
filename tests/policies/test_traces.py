"""Which requests each step computes, in steps of a second on a server of one seat or a few.

A trace has the numbers of the requests, with a space between steps if there are more seats. Each is
short enough to be followed by hand, and the reference of the policy has the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request
from policies.ltr import LTR
from policies.mlfq import MLFQ, PLAS, SkipJoin
from tests.policies.reference import queues
from tests.policies.served import Job, served

PAIRS: dict[str, tuple[Callable[..., Policy], Callable[..., Policy]]] = {
    "ltr": (LTR, queues.LTR),
    "mlfq": (MLFQ, queues.MLFQ),
    "skip_join": (SkipJoin, queues.SkipJoin),
    "plas": (PLAS, queues.PLAS),
}


def trace(jobs: list[Job], policy: Policy, **server: Any) -> str:
    outcome = served(jobs, policy, **{"max_seqs": 1, **server})
    computed = ([*(c.request for c in p.chunks), *p.decodes] for p in outcome.plans)
    steps = ["".join(str(request.id) for request in step) for step in computed if step]
    return ("" if outcome.scheduler.max_seqs == 1 else " ").join(steps)


def job(at: float, output: int, prompt: int = 1, **knows: Any) -> Job:
    return Job(at, prompt, output, knows)


def guess(at: float, output: int, predicted: float, prompt: int = 1) -> Job:
    return Job(at, prompt, output, {"predicted_len": predicted})


@dataclass
class Case:
    policy: str
    settings: dict[str, Any]
    jobs: list[Job]
    trace: str
    server: dict[str, Any] = field(default_factory=dict)


CHUNKS = {"batching": "unified", "max_batched_tokens": 2}
LEVELS = {"quantum": 2.0, "levels": 3, "starve": 100.0}  # of 2 s, 4 s and without an end
CASES = {
    # After four idle steps a request is urgent for three tokens, and of two that are, the lower
    # prediction goes first: 1 overtakes 0 as soon as it is urgent, too.
    "starved": Case(
        "ltr",
        {"starve": 4, "period": 3},
        [guess(0, 9, 9), guess(0, 30, 1)],
        "111100011100011100011111111111111111111",
    ),
    "starved without displacing": Case(
        "ltr",
        {"starve": 4, "period": 3, "displace": False},
        [guess(0, 9, 9), guess(0, 20, 1)],
        "11111111111111111111000000000",
    ),
    "starved in a prefill": Case(
        "ltr",
        {"starve": 4, "period": 3},
        [guess(0, 6, 9, prompt=10), guess(0, 20, 1)],
        "111100011111000111111000111111110001111111110001111111111100011111111110000000000",
        CHUNKS,
    ),
    "a level each time": Case(
        "mlfq", LEVELS, [job(0, 12), job(0.5, 3), job(4.5, 6)], "001102200012222000000"
    ),
    # What request 0 had of the second quantum before it is displaced counts when it goes on.
    "displaced within a quantum": Case(
        "mlfq",
        LEVELS,
        [job(0, 9), job(2.5, 1), job(3.5, 1), job(4.5, 3), job(4.5, 9)],
        "00012334400034444000444",
    ),
    "back to the first level": Case(
        "mlfq",
        {"quantum": 2.0, "levels": 4, "starve": 6.0},
        [job(0, 12), *(job(2 + at, 1) for at in range(9))],
        "001234560078900000000",
    ),
    "joined where the prefill fits": Case(
        "skip_join",
        {**LEVELS, "prefill_rate": 1.0},
        [job(0, 3, prompt=4), job(0, 3, prompt=3), job(0, 3, prompt=2), job(0, 2, prompt=5)],
        "22000111233",
    ),
    "a session that was served": Case(
        "plas",
        {"quantum": 1.0, "levels": 4, "starve": 100.0},
        [
            job(0, 4, session="a"),
            job(4.5, 4, session="a"),
            job(4.5, 4, session="b"),
            job(6.5, 3, session="c"),
        ],
        "000022323311112",
    ),
    # Request 1 is urgent for one token, and then the last of the batch again: 2 displaces it.
    "urgency ends in the batch": Case(
        "ltr",
        {"starve": 3, "period": 1},
        [guess(1, 9, 3, prompt=4), guess(3, 4, 5), guess(4.5, 6, 2)],
        "0 0 1 01 0 2 20 2 1 2 0 20 2 10 0",
        {"max_seqs": 2},
    ),
    "urgent no sooner than due": Case(
        "ltr",
        {"starve": 3, "period": 2},
        [job(0, 4), guess(1, 5, 5), guess(2, 1, 1)],
        "0100211011",
        {"blocks": 10},
    ),
    # Displaced twice at one level, request 1 has both shares of its quantum counted.
    "displaced twice within a quantum": Case(
        "mlfq",
        {"quantum": 2.0, "levels": 4, "starve": 5.0},
        [job(0, 7), job(2, 7), job(3, 1), job(5.5, 2)],
        "00112033011001110",
    ),
    # On the first level a wait takes nothing from what a request was served.
    "starved on the first level": Case(
        "mlfq",
        {"quantum": 1.5, "levels": 4, "starve": 3.0},
        [job(0, 9), job(0, 4), job(2, 5)],
        "001120011200022002",
        {"blocks": 10},
    ),
    "a quantum is used up once": Case(
        "mlfq",
        {**LEVELS, "quantum": 1.0, "levels": 4},
        [job(1, 8, prompt=4), job(3, 4), job(4.5, 3)],
        "001021122000010",
    ),
    # Four seconds of prefill are charged to the levels that they fill, one after another.
    "a fall by several levels": Case(
        "mlfq",
        {"quantum": 1.0, "levels": 3, "starve": 5.0},
        [job(4.5, 8, prompt=7), job(5.5, 3)],
        "00001110000000000",
        CHUNKS,
    ),
    # Request 1 is displaced, and both parts of its time count for the session.
    "a session served in two parts": Case(
        "plas",
        {"quantum": 1.5, "levels": 3, "starve": 5.0},
        [
            job(0, 4, session="b"),
            job(3, 3, prompt=7, session="b"),
            job(5.5, 1, prompt=7, session="b"),
        ],
        "00011012",
        {"blocks": 12},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_step_computes_what_the_rule_says(name: str) -> None:
    case = CASES[name]
    ours, reference = PAIRS[case.policy]
    assert trace(case.jobs, ours(**case.settings), **case.server) == case.trace
    assert trace(case.jobs, reference(**case.settings), **case.server) == case.trace


def test_a_call_that_comes_in_the_last_step_of_its_session_joins_the_level_of_all_of_it() -> None:
    """It is ranked when it is added, and again once the call before it has ended."""
    policy = PLAS(quantum=1.0, levels=4)
    memory = make_memory("paged", blocks=64, block_size=4)
    scheduler = make_scheduler(memory=memory, policy=policy, max_seqs=1)
    scheduler.add(Request("first", 4, session="a"), 0.0, 2)
    scheduler.commit(scheduler.plan(0.0), 1.0)
    plan = scheduler.plan(1.0)
    scheduler.add(Request("second", 4, session="a"), 1.2, 2)
    scheduler.add(Request("other", 4, session="b"), 1.5, 2)
    scheduler.commit(plan, 2.0)
    assert [request.id for request, _ in scheduler.plan(2.0).hits] == ["other"]
