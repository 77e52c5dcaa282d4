"""Deadlines and objectives: who is due first goes first, and who is too late is shed."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.core import ConfigError, State
from policies.ordering import EDF
from policies.slo import SLO
from tests.policies.served import Job, served, started

JOBS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20)), min_size=1, max_size=5)


def some_order_meets_all(pairs: list[tuple[int, int]]) -> bool:
    for order in permutations(pairs):
        now = 0
        for output, due in order:
            now += output
            if now > due:
                break
        else:
            return True
    return False


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@given(pairs=JOBS)
def test_edf_meets_all_deadlines_whenever_some_order_does(
    batching: str, pairs: list[tuple[int, int]]
) -> None:
    jobs = [Job(0, 1, output, {"deadline": float(due)}) for output, due in pairs]
    found = served(jobs, "edf", batching=batching, max_seqs=1).requests
    met = all((r.finished_at or 0) <= (r.deadline or 0) for r in found)
    assert met == some_order_meets_all(pairs)


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_who_is_too_late_before_it_began_is_shed(batching: str) -> None:
    jobs = [Job(0, 1, 5, {"deadline": due}) for due in (4.0, 5.0, 3.0, 20.0)]
    found = served(jobs, EDF(shed=True), batching=batching, max_seqs=1).requests
    late = [request for request in found if request.state is State.REJECTED]
    assert [request.id for request in late] == [0]
    assert late[0].finish_reason == "its deadline, 4 s, has passed"
    kept = served(jobs, "edf", batching=batching, max_seqs=1).requests
    assert all(request.state is State.FINISHED for request in kept)


def test_a_class_may_wait_as_long_as_its_target_says() -> None:
    jobs = [Job(0, 1, 9), *(Job(at, 1, 1, {"priority": at % 2}) for at in (1, 2, 3, 4))]
    policy = SLO({0: 1.0, 1: 2.5})
    # Due at 3.5 (arrived at 1), 3 (2), 5.5 (3) and 5 (4).
    assert started(served(jobs, policy, max_seqs=1)) == [0, 2, 1, 4, 3]


def test_a_priority_between_two_targets_has_that_of_the_less_urgent() -> None:
    jobs = [Job(1, 1, 1, {"priority": level}) for level in (-1, 0, 0.5, 1, 2)]
    policy = SLO({0: 1.0, 1: 2.5})
    found = served(jobs, policy).requests
    assert [policy.due(request) for request in found] == [2, 2, 3.5, 3.5, float("inf")]


def test_who_waited_longer_than_its_class_may_is_shed_on_request() -> None:
    jobs = [Job(0, 1, 9), Job(1, 1, 1), Job(1, 1, 1, {"priority": 1})]
    found = served(jobs, SLO({0: 3.0, 1: 30.0}, shed=True), max_seqs=1).requests
    assert [request.state.value for request in found] == ["finished", "rejected", "finished"]
    assert found[1].finish_reason == "its first token was due at 4 s"


@pytest.mark.parametrize(
    ("targets", "line"),
    [
        (3, r"targets=3: must be seconds by priority, such as \{0: 1, 1: 10\}"),
        ({}, r"targets=\{\}: must be seconds by priority"),
        ({"a": 1}, "targets.a: a priority must be a number"),
        ({0: -1}, "targets.0=-1: must be a number above 0"),
    ],
)
def test_targets_that_are_none(targets: object, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        SLO(targets)  # type: ignore[arg-type]
