"""Which request each step computes, on a server of one seat and steps of a second.

A trace has one character a step: the number of the request. Each is short enough to be followed by
hand, and the reference of the policy has the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagedsim.core import Policy
from policies.ltr import LTR
from policies.mlfq import MLFQ, SkipJoin
from policies.plas import PLAS
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
    return "".join(str(request.id) for step in computed for request in step)


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
    "two are starved": Case(
        "ltr",
        {"starve": 5, "period": 4},
        [guess(0, 9, 9), guess(1, 9, 8), guess(0, 30, 1)],
        "222221111222211112222100022220222200002222022222",
    ),
    "starved in a prefill": Case(
        "ltr",
        {"starve": 4, "period": 3},
        [guess(0, 6, 9, prompt=10), guess(0, 20, 1)],
        "111100011111000111111000111111110001111111110001111111111100011111111110000000000",
        CHUNKS,
    ),
    "without a prediction": Case(
        "ltr",
        {"starve": 40, "period": 3},
        [job(0, 3), guess(0, 5, 9), guess(1, 3, 1)],
        "12221111000",
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
    "the last level has no end": Case(
        "mlfq",
        {**LEVELS, "quantum": 1.0},
        [job(0, 10), job(0, 10), job(0, 10)],
        "012001122000000011111112222222",
    ),
    "no fall before a token": Case(
        "mlfq",
        LEVELS,
        [job(0, 4, prompt=8), job(0, 4, prompt=8)],
        "000011110000011111000000111111",
        CHUNKS,
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
}


@pytest.mark.parametrize("name", CASES)
def test_each_step_computes_what_the_rule_says(name: str) -> None:
    case = CASES[name]
    ours, reference = PAIRS[case.policy]
    assert trace(case.jobs, ours(**case.settings), **case.server) == case.trace
    assert trace(case.jobs, reference(**case.settings), **case.server) == case.trace
