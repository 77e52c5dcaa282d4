"""Policies of sessions, on cases that are followed by hand; a step takes a second."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.policies.program_aware import ProgramAware
from pagedsim.policies.session_affinity import SessionAffinity
from tests.policies.served import Job, served, started

# Bounded session affinity


BEGINNING = [*range(16)]
"""Four blocks of four tokens, and no more in any prompt here."""
PATIENT: dict[str, Any] = {"max_wait": 100.0, "ttl": 100.0}


def call(at: float, session: str | None, *tokens: int, output: int = 1) -> Job:
    return Job(at, list(tokens), output, {"session": session})  # type: ignore[arg-type]


def order(jobs: list[Job], policy: Any) -> list[int]:
    return [*started(served(jobs, policy, memory="prefix", max_seqs=1))]


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        # Session a left at 1 s. At 6 s its next call, of four cached blocks, is second in a queue
        # whose first has waited for 4 s.
        ({}, True),
        ({"max_wait": 4.0}, False),
        ({"max_wait": 4.1}, True),
        ({"ttl": 5.0}, True),
        ({"ttl": 4.9}, False),
        ({"window": 2}, True),
        ({"window": 1}, False),
        ({"min_blocks": 4}, True),
        ({"min_blocks": 5}, False),
    ],
)
def test_a_call_overtakes_within_all_bounds(settings: dict[str, Any], first: bool) -> None:
    jobs = [
        call(0, "a", *BEGINNING, 50),
        call(0.1, "b", 60, output=5),
        call(2, "c", *range(100, 120)),
        call(3, "a", *BEGINNING, 51),
    ]
    expected = [0, 1, 3, 2] if first else [0, 1, 2, 3]
    assert order(jobs, SessionAffinity(**{**PATIENT, **settings})) == expected
    jobs[3] = call(3, "d", *BEGINNING, 51)  # its beginning is cached, and its session is new
    assert order(jobs, SessionAffinity(**PATIENT)) == [0, 1, 2, 3]


def test_of_several_calls_the_most_cached_goes_first_then_the_session_that_ran_last() -> None:
    jobs = [
        *(call(0.1 * number, name, *BEGINNING, 50) for number, name in enumerate("abc")),
        call(0.4, "filler", 60, output=9),
        call(5.0, "cold", 61),
        call(5.1, "a", *BEGINNING, 70),
        call(5.2, "b", *BEGINNING, 71),
        call(5.3, "c", *BEGINNING[:8], 72),
    ]
    assert order(jobs, SessionAffinity(**PATIENT)) == [0, 1, 2, 3, 6, 5, 7, 4]


def test_what_is_overtaken_starts_once_it_has_waited_so_long() -> None:
    """A call of one of two sessions is always there when a seat is free."""
    warm = [call(0.9 * number, "ab"[number % 2], *BEGINNING, number + 50) for number in range(40)]
    jobs = [*warm, call(2.5, "cold", 60)]
    for bound in (5.0, 12.0):
        outcome = served(jobs, SessionAffinity(max_wait=bound), memory="prefix", max_seqs=1)
        cold = next(request for request in outcome.requests if request.session == "cold")
        assert cold.scheduled_at is not None
        assert bound <= cold.scheduled_at - 2.5 < bound + 1


def test_without_a_prefix_cache_nobody_overtakes() -> None:
    jobs = [call(0.1 * n, "a", *BEGINNING, n) for n in range(4)]
    jobs[1] = call(0.1, "b", 60, output=3)
    assert started(served(jobs, SessionAffinity(**PATIENT), max_seqs=1)) == [0, 1, 2, 3]


# llm-d's program-aware scheduling


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # At 61 s the 32 tokens that a has had by 1 s count 16; b has just had 22, and c nothing.
        ({"service": 1.0, "wait": 0.0}, "cab"),
        ({"service": 1.0, "wait": 0.0, "half_life": 0.0}, "cba"),
        ({"service": 0.0, "wait": 1.0}, "abc"),
        # 0.8 × (1 − 16 / 22) + 0.2 for a, 0.2 × 0.5 for b, 0.8 for c; then a has both and b none.
        ({}, "cab"),
        # 0.6 for a, 0.225 for b, 0.55 for c; then b has waited the longer, and c had the less.
        ({"service": 0.55, "wait": 0.45}, "acb"),
        ({"service": 0.45, "wait": 0.55}, "abc"),
    ],
)
def test_programs_go_by_what_they_had_lately_and_how_long_they_wait(
    settings: dict[str, Any], expected: str
) -> None:
    jobs = [
        Job(0, 30, 1, {"session": "a"}),
        Job(0.1, 1, 59, {"session": "filler"}),
        Job(0.2, 20, 1, {"session": "b"}),
        Job(60.1, 1, 1, {"session": "a"}),
        Job(60.2, 1, 1, {"session": "b"}),
        Job(60.3, 1, 1, {"session": "c"}),
    ]
    numbers = started(served(jobs, ProgramAware(**settings), max_seqs=1))
    assert "".join("abc"[number - 3] for number in numbers if number > 2) == expected


def test_a_program_is_charged_when_its_request_ends() -> None:
    """Its second call is ranked without what its first, which runs, has had so far."""
    jobs = [
        Job(0, 40, 9, {"session": "a"}),
        Job(0.1, 1, 4, {"session": "b"}),
        Job(4.5, 1, 1, {"session": "b"}),
        Job(4.6, 1, 1, {"session": "a"}),
    ]
    assert started(served(jobs, ProgramAware(wait=0.0), max_seqs=2)) == [0, 1, 3, 2]
