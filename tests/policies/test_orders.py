"""Orders by size, deadline and cached prefix, and how long aging lets a request wait."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.build import POLICIES
from pagedsim.core import Policy, Request, ServerState, State
from pagedsim.policies.aging import Aging
from pagedsim.policies.ordering import EDF, HRRN, Priority
from pagedsim.policies.slo import SLO
from tests.policies.served import Job, served, started

# By size


SIZED = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=7)


def jobs_of(pairs: list[tuple[int, int]]) -> list[Job]:
    return [
        Job(at, 1, output, {"predicted_len": float(output), "client": "ab"[output % 2]})
        for at, output in pairs
    ]


def least_mean_response(pairs: list[tuple[int, int]]) -> float:
    """What is possible at best where a job computes one token a second, on any of them."""
    left = {number: output for number, (_, output) in enumerate(pairs)}
    now, total = 0, 0
    while left:
        here = [number for number in left if pairs[number][0] <= now]
        now += 1
        if not here:
            continue
        shortest = min(here, key=left.__getitem__)
        left[shortest] -= 1
        if not left[shortest]:
            total += now - pairs[shortest][0]
            del left[shortest]
    return total / len(pairs)


@settings(max_examples=settings().max_examples // 2)
@given(pairs=SIZED, batching=st.sampled_from(["prefill_first", "unified"]))
def test_no_order_has_a_lower_mean_response_than_srpt(
    pairs: list[tuple[int, int]], batching: str
) -> None:
    jobs = jobs_of(pairs)
    best = least_mean_response(pairs)
    settings: dict[str, Any] = {"batching": batching, "max_seqs": 1}
    assert served(jobs, "srpt", **settings).mean_response == pytest.approx(best)
    for name in ("fcfs", "sjf", "hrrn", "mlfq"):
        assert served(jobs, name, **settings).mean_response >= best - 1e-9


def test_sjf_finishes_what_it_began_and_srpt_does_not() -> None:
    jobs = jobs_of([(0, 9), (2, 3)])
    assert [r.finished_at for r in served(jobs, "sjf", max_seqs=1).requests] == [9, 12]
    assert [r.finished_at for r in served(jobs, "srpt", max_seqs=1).requests] == [12, 5]


@pytest.mark.parametrize("name", [name for name, kind in POLICIES.items() if kind.needs])
def test_without_what_it_needs_it_is_first_come_first_served(name: str) -> None:
    jobs = [Job(at, 4, 3) for at in range(6)]
    memory = "radix" if POLICIES[name].walks_tree else "prefix"
    assert started(served(jobs, name, max_seqs=2, memory=memory)) == list(range(6))


def test_the_response_ratio_grows_with_the_wait_and_falls_with_the_prompt() -> None:
    # At 8 s the short one has waited 1 s for 2 tokens, the long one 8 s for 20.
    jobs = [Job(0, 1, 8), Job(0, 20, 1), Job(7, 2, 1)]
    assert started(served(jobs, "hrrn", max_seqs=1)) == [0, 2, 1]
    jobs[2] = Job(7.5, 2, 1)
    assert started(served(jobs, "hrrn", max_seqs=1)) == [0, 1, 2]


# By deadline: a request that is too late is shed


DUE = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20)), min_size=1, max_size=5)


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


@given(pairs=DUE, batching=st.sampled_from(["prefill_first", "unified"]))
def test_edf_meets_all_deadlines_whenever_some_order_does(
    pairs: list[tuple[int, int]], batching: str
) -> None:
    jobs = [Job(0, 1, output, {"deadline": float(due)}) for output, due in pairs]
    found = served(jobs, "edf", batching=batching, max_seqs=1).requests
    met = all((r.finished_at or 0) <= (r.deadline or 0) for r in found)
    assert met == some_order_meets_all(pairs)


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_request_that_is_too_late_to_start_is_rejected(batching: str) -> None:
    jobs = [Job(0, 1, 5, {"deadline": due}) for due in (4.0, 5.0, 3.0, 20.0)]
    found = served(jobs, EDF(shed=True), batching=batching, max_seqs=1).requests
    late = [request for request in found if request.state is State.REJECTED]
    assert [request.id for request in late] == [0]
    assert late[0].finish_reason == "its deadline, 4 s, has passed"
    kept = served(jobs, "edf", batching=batching, max_seqs=1).requests
    assert all(request.state is State.FINISHED for request in kept)


def test_slo_orders_by_the_targets_of_classes() -> None:
    jobs = [Job(0, 1, 9), *(Job(at, 1, 1, {"priority": at % 2}) for at in (1, 2, 3, 4))]
    policy = SLO({0: 1.0, 1: 2.5})
    # Due at 3.5 (arrived at 1), 3 (2), 5.5 (3) and 5 (4).
    assert started(served(jobs, policy, max_seqs=1)) == [0, 2, 1, 4, 3]


def test_a_request_past_the_target_of_its_class_is_rejected_where_shed_is_set() -> None:
    jobs = [Job(0, 1, 9), Job(1, 1, 1), Job(1, 1, 1, {"priority": 1})]
    found = served(jobs, SLO({0: 3.0, 1: 30.0}, shed=True), max_seqs=1).requests
    assert [request.state.value for request in found] == ["finished", "rejected", "finished"]
    assert found[1].finish_reason == "its first token was due at 4 s"


# By the longest cached prefix


# Under a load that never ends


FLOOD = 200
"""Short urgent requests, one a second."""


def flood(**knows: float) -> list[Job]:
    return [Job(at, 1, 1, dict(knows)) for at in range(FLOOD)]


@pytest.mark.parametrize(("rate", "behind"), [(0.05, 9), (0.5, 5)])
def test_aging_bounds_the_wait_by_the_difference_in_rank(rate: float, behind: int) -> None:
    jobs = [Job(0.5, 1, 1, {"priority": behind}), *flood(priority=0)]
    urgent_first = Priority(displace=False)
    late = served(jobs, Aging(urgent_first, rate), max_seqs=1).requests
    waited = next(r for r in late if r.id == 0)
    assert waited.scheduled_at is not None
    # Ahead of it go those that came up to `behind` / `rate` seconds later, a second each.
    assert waited.scheduled_at - 0.5 <= behind / rate + 2
    without = served(jobs, urgent_first, max_seqs=1).requests
    starved = next(r for r in without if r.id == 0)
    assert starved.scheduled_at == FLOOD


def test_hrrn_counts_what_the_prefix_cache_has_by_now() -> None:
    """The second request fills the cache with what the third begins with, which therefore goes
    before the fourth, of fewer tokens."""
    prompts = [[*range(500, 516)], [*range(40)], [*range(32), *range(100, 116)], 44]
    jobs = [
        Job(0.1 * number, prompt, 1 + 2 * (number < 2))  # type: ignore[arg-type]
        for number, prompt in enumerate(prompts)
    ]
    limits: dict[str, Any] = {"memory": "prefix", "block_size": 16, "max_seqs": 1}
    assert started(served(jobs, HRRN(), **limits)) == [0, 1, 2, 3]
    assert started(served(jobs, HRRN(), **{**limits, "memory": "paged"})) == [0, 1, 3, 2]


def test_aging_leaves_all_but_the_last_number_of_a_rank_as_they_are() -> None:
    class Levels(Policy):
        def rank(self, request: Request, state: ServerState) -> tuple[float, float]:
            return (request.priority, request.prompt_len)

    # Of level 0 are the second and the third, with 9 + 10 * 0.5 and 11 + 10 * 0.2.
    rows = [(0.0, 1, 0), (0.5, 9, 0), (0.2, 11, 0), (0.1, 1, 1)]
    jobs = [Job(at, prompt, 1, {"priority": priority}) for at, prompt, priority in rows]
    assert started(served(jobs, Aging(Levels(), rate=10), max_seqs=1)) == [0, 2, 1, 3]
