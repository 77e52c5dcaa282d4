"""No request waits for ever: bounds on the wait under a load that never ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pagedsim.core import Scheduler, StepPlan
from policies.aging import Aging
from policies.ltr import LTR
from policies.mlfq import MLFQ
from policies.ordering import HRRN, Priority
from tests.policies.served import Job, served, started

FLOOD = 200
"""Short urgent requests, one a second."""


def flood(**knows: float) -> list[Job]:
    return [Job(at, 1, 1, dict(knows)) for at in range(FLOOD)]


@pytest.mark.parametrize(("rate", "behind"), [(0.05, 1), (0.05, 9), (0.1, 9), (0.5, 5), (2.0, 9)])
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


def longest_gap(policy: MLFQ | LTR, jobs: list[Job]) -> float:
    """Seconds between two tokens of request 0, at most."""
    seen = [0.5]
    tokens = [0]

    def look(scheduler: Scheduler, plan: StepPlan) -> None:
        request = scheduler.requests.get(0)
        if request is not None and request.generated > tokens[-1]:
            tokens.append(request.generated)
            seen.append(scheduler.now)

    served(jobs, policy, max_seqs=1, look=look)
    assert len(seen) > 3
    return max(later - sooner for sooner, later in pairwise(seen))


@pytest.mark.parametrize("starve", [3.0, 10.0])
def test_mlfq_serves_requests_that_waited_long(starve: float) -> None:
    jobs = [Job(0.5, 1, 9), *flood()]
    # On the first level again it stands behind at most one that runs there.
    assert longest_gap(MLFQ(quantum=0.5, starve=starve), jobs) <= starve + 3
    assert longest_gap(MLFQ(quantum=0.5, starve=FLOOD), jobs) > 30


@pytest.mark.parametrize("starve", [12, 25])
def test_ltr_makes_idle_requests_urgent(starve: int) -> None:
    jobs = [Job(0.5, 1, 9, {"predicted_len": 9.0}), *flood(predicted_len=1.0)]
    assert longest_gap(LTR(starve=starve, period=1), jobs) <= starve + 4
    assert longest_gap(LTR(starve=2 * FLOOD), jobs) > 30


def test_of_a_rank_of_several_numbers_the_last_ages() -> None:
    """Whom `ltr` would let starve for ever, were there no urgency, is served when it is due."""
    jobs = [Job(0.5, 1, 1, {"predicted_len": 9.0}), *flood(predicted_len=1.0)]
    patient = LTR(starve=2 * FLOOD, displace=False)
    late = served(jobs, Aging(patient, rate=0.5), max_seqs=1).requests
    waited = next(r for r in late if r.id == 0)
    # Ahead of it go those that came up to 8 / 0.5 seconds later, a second each.
    assert waited.scheduled_at is not None and waited.scheduled_at - 0.5 <= 16 + 2
    starved = next(r for r in served(jobs, patient, max_seqs=1).requests if r.id == 0)
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
