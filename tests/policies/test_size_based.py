"""Orders by size: what each is known for, on small cases and on random ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.build import POLICIES
from tests.policies.served import Job, served, started

JOBS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=7)


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


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@given(pairs=JOBS)
def test_no_order_has_a_lower_mean_response_than_srpt(
    batching: str, pairs: list[tuple[int, int]]
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
    assert started(served(jobs, name, max_seqs=2, memory="prefix")) == list(range(6))


def test_the_response_ratio_grows_with_the_wait_and_falls_with_the_prompt() -> None:
    # At 8 s the short one has waited 1 s for 2 tokens, the long one 8 s for 20.
    jobs = [Job(0, 1, 8), Job(0, 20, 1), Job(7, 2, 1)]
    assert started(served(jobs, "hrrn", max_seqs=1)) == [0, 2, 1]
    jobs[2] = Job(7.5, 2, 1)
    assert started(served(jobs, "hrrn", max_seqs=1)) == [0, 1, 2]


def test_mlfq_lets_the_short_overtake_what_has_had_its_quantum() -> None:
    jobs = [Job(0, 1, 20), Job(3, 1, 2)]
    found = served(jobs, "mlfq", max_seqs=1)  # a step of 1 s is many quanta
    assert [request.finished_at for request in found.requests] == [22, 5]


def test_skip_join_begins_where_the_prefill_fits() -> None:
    from policies.mlfq import SkipJoin

    policy = SkipJoin(quantum=1.0, levels=4, prefill_rate=10.0)
    found = served([Job(0, tokens, 1) for tokens in (5, 10, 11, 40, 41)], policy, max_seqs=8)
    assert [policy.entry(request) for request in found.requests] == [0, 0, 1, 2, 3]
