"""Admission: no request is preempted where lengths are known, and nothing ever stops."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.build import make_policy
from pagedsim.core import SamplingParams
from pagedsim.policies.admission import Cap
from pagedsim.policies.ordering import Priority
from tests.policies.served import Job, Outcome, by_tokens, served

JOBS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12
)

HALF = settings(max_examples=settings().max_examples // 2)
SIX = SamplingParams(max_tokens=6)


def preempted(outcome: Outcome) -> int:
    return sum(len(plan.preempted) for plan in outcome.plans)


def test_swapped_requests_do_not_block_admission_while_none_runs() -> None:
    """`b` takes the seat of `a`. `c` goes before `a`, and memory will not hold both."""
    jobs = [
        Job(at, prompt, 6, {"priority": priority, "predicted_len": 6.0, "params": SIX})
        for at, prompt, priority in ((0, 17, 2), (2, 17, 0), (4, 60, 1))
    ]
    found = served(
        jobs, make_policy("reserve", of=Priority(displace=True)), preemption="swap",
        batching="unified", max_seqs=1, blocks=20, cpu_blocks=20, max_batched_tokens=64,
    )  # fmt: skip
    assert found.requests[0].swapped_blocks > 0
    assert [r.id for r in sorted(found.requests, key=lambda r: r.finished_at or 0)] == [1, 2, 0]


def test_a_full_reservation_counts_a_request_that_is_swapped_out() -> None:
    """Request 2 takes the seat of request 1. Request 3 gets the seat of request 0 only when both of
    these have ended, for memory does not hold all three at their longest."""
    rows = [(0, 17, 4, 2), (0, 17, 6, 2), (1, 17, 20, 0), (2, 29, 6, 1)]
    jobs = [
        Job(at, prompt, output, {"priority": priority, "params": SamplingParams(max_tokens=output)})
        for at, prompt, output, priority in rows
    ]
    found = served(
        jobs, make_policy("reserve", of=Priority(displace=True)), preemption="swap",
        batching="unified", max_seqs=2, blocks=25, cpu_blocks=20,
    ).requests  # fmt: skip
    assert found[1].swapped_blocks > 0
    assert found[3].scheduled_at == found[2].finished_at


def largest_batch(outcome: Outcome) -> int:
    return max(plan.running for plan in outcome.plans)


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@HALF
@given(rows=JOBS, blocks=st.integers(20, 40))
def test_a_full_reservation_never_preempts(
    batching: str, rows: list[tuple[int, int, int]], blocks: int
) -> None:
    jobs = [Job(at, prompt, output) for at, prompt, output in rows]
    found = served(
        jobs, "reserve", batching=batching, blocks=blocks, block_size=4, max_model_len=40
    )
    assert preempted(found) == 0


def test_a_cap_bounds_the_batch_under_any_order() -> None:
    jobs = [Job(0, 4, 9, {"priority": number % 3}) for number in range(20)]
    found = served(jobs, Cap(Priority(displace=False), most=3), max_seqs=16)
    assert largest_batch(found) == 3
    assert [r.priority for plan in found.plans for r, _ in plan.hits] == sorted(
        job.knows["priority"] for job in jobs
    )


@HALF
@given(rows=JOBS, budget=st.integers(16, 40))
def test_a_chunk_budget_bounds_the_time_between_tokens(
    rows: list[tuple[int, int, int]], budget: int
) -> None:
    seen: dict[Any, float] = {}
    gaps: list[float] = []

    def look(scheduler: Any, plan: Any) -> None:
        for request in (*plan.decodes, *(c.request for c in plan.chunks if c.samples)):
            if request.id in seen:
                gaps.append(scheduler.now - seen[request.id])
            seen[request.id] = scheduler.now

    jobs = [Job(at, 5 * prompt, output) for at, prompt, output in rows]
    served(
        jobs, "fcfs", seconds=by_tokens, look=look,
        batching="unified", max_batched_tokens=budget, max_seqs=16,
    )  # fmt: skip
    assert max(gaps, default=0) <= budget


LONG = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(5, 40)), min_size=2, max_size=14
)


def steps_until_urgent(
    rows: list[tuple[int, int, int]], prompt: int, policy: Priority, **settings: Any
) -> int:
    """How many steps begin without an urgent request that comes when others run."""
    jobs = [Job(at, before, output, {"priority": 1}) for at, before, output in rows]
    jobs.append(Job(12.5, prompt, 3))
    found = served(jobs, policy, **settings)
    urgent = next(r for r in found.requests if r.priority == 0)
    assert urgent.arrival is not None
    plans = [plan for plan in found.plans if plan.now >= urgent.arrival]
    return next(i for i, plan in enumerate(plans) if any(r is urgent for r, _ in plan.hits))


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize("cpu_blocks", [0, 20])
@HALF
@given(rows=LONG, prompt=st.integers(1, 24), blocks=st.integers(16, 30))
def test_the_batch_does_not_grow_into_the_room_that_was_made(
    batching: str, cpu_blocks: int, rows: list[tuple[int, int, int]], prompt: int, blocks: int
) -> None:
    preemption = "swap" if cpu_blocks else "recompute"
    waited = steps_until_urgent(
        rows, prompt, Priority(displace=True), batching=batching, max_seqs=16,
        blocks=blocks, block_size=4, preemption=preemption, cpu_blocks=cpu_blocks,
    )  # fmt: skip
    assert waited <= 1
