"""Steps that change nothing are not planned one by one; `tests/test_fuzz.py` finds that they change
nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import (
    PlanError,
    Policy,
    Request,
    SamplingParams,
    Scheduler,
    ServerState,
    StepPlan,
)
from pagedsim.policies.admission import Reserve
from pagedsim.policies.fairness import VTC
from pagedsim.policies.mlfq import MLFQ
from pagedsim.policies.ordering import EDF, HRRN, SRPT
from pagedsim.policies.past_future import PastFuture
from tests.core.odd_policies import Aging, SmallBatches

LONG = 40
"""Tokens of each output: as many steps pass until any request ends."""

both = pytest.mark.parametrize("batching", ["prefill_first", "unified"])


def waiting(policy: Policy, batching: str = "prefill_first", prompt: int = 8) -> Scheduler:
    """Two decode, and a third, which came later, waits: for memory, if its prompt is long."""
    scheduler = make_scheduler(
        memory=make_memory(blocks=64, block_size=4), policy=policy, batching=batching
    )
    for number, size in enumerate((40, 40, prompt)):
        request = Request(number, size, SamplingParams(max_tokens=LONG, temperature=0.0))
        request._client, request._priority, request._deadline = "abc"[number], number, 1e6 + number
        request._predicted_len = LONG + number
        scheduler.add(request, scheduler.now, output_len=LONG)
        scheduler.commit(scheduler.plan(scheduler.now), scheduler.now + 1.0)
    for _ in range(2):
        scheduler.commit(scheduler.plan(scheduler.now), scheduler.now + 1.0)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)
    return scheduler


def repeat(scheduler: Scheduler, plan: StepPlan) -> tuple[int, bool]:
    """Number of steps repeated after `plan`, and whether the last of them is to be committed."""
    steps, quiet = 0, scheduler.uneventful(plan)
    while steps < quiet and scheduler.fast_forward(plan, scheduler.now + 1.0):
        steps += 1
    return steps, steps == quiet


@both
@pytest.mark.parametrize(
    ("make", "prompt"),
    [
        *[(make, 180) for make in (HRRN, VTC, SRPT, Aging)],
        (lambda: MLFQ(displace=False), 180),
        (lambda: EDF(shed=True), 180),
        *[(make, 100) for make in (lambda: SmallBatches(2), Reserve, PastFuture)],
    ],
)
def test_no_step_is_planned_while_a_request_lacks_memory_or_may_not_start(
    make: Callable[[], Policy], prompt: int, batching: str
) -> None:
    scheduler = waiting(make(), batching, prompt)
    assert repeat(scheduler, scheduler.plan(scheduler.now))[0] > 20


# Steps that are planned one by one


@pytest.mark.parametrize(("policy", "skips"), [(Policy, True), (Aging, False), (HRRN, False)])
def test_no_step_is_skipped_while_reservations_wait_under_changing_ranks(
    policy: Callable[[], Policy], skips: bool
) -> None:
    scheduler = waiting(policy(), "unified", prompt=180)
    other = make_scheduler(memory=make_memory(blocks=64, block_size=4))
    coming = Request(9, 200, SamplingParams(max_tokens=LONG))
    other.add(coming, 0.0, output_len=LONG)
    other.commit(other.plan(0.0), 1.0)
    scheduler.abort(2, scheduler.now)
    assert not scheduler.migration.reserve(coming, scheduler.now)
    plan = scheduler.plan(scheduler.now)
    assert (scheduler.uneventful(plan) > 0) is skips


def test_no_step_is_skipped_after_an_arrival_since_the_plan() -> None:
    scheduler = decoding("a")
    plan = scheduler.plan(1.0)
    assert scheduler.uneventful(plan)
    scheduler.add(Request("b", 4), 1.0, output_len=9)
    assert scheduler.uneventful(plan) == 0
    scheduler.commit(plan, 2.0)
    with pytest.raises(PlanError, match="stale"):
        scheduler.fast_forward(plan, 2.0)


class Lingering(Policy):
    """What a request leaves in the cache is kept for 20 s."""

    def pin_prefix_for(self, request: Request, state: ServerState) -> float:
        return 20.0


def test_no_step_is_skipped_while_memory_that_another_wants_is_kept_for_a_time() -> None:
    """Of 32 blocks, 10 are kept from 1 s to 21 s, and one request runs; another wants 15."""
    memory = make_memory("prefix", blocks=32, block_size=4)
    scheduler = make_scheduler(memory=memory, policy=Lingering())
    scheduler.add(Request(0, range(40)), 0.0, output_len=1)
    scheduler.add(Request(1, range(100, 130)), 0.0, output_len=LONG)
    scheduler.commit(scheduler.plan(0.0), 1.0)
    scheduler.add(Request(2, range(200, 260)), 1.0, output_len=LONG)
    scheduler.commit(scheduler.plan(1.0), 2.0)
    plan = scheduler.plan(2.0)
    assert not plan.chunks and scheduler.uneventful(plan) == 0
    scheduler.commit(plan, 21.0)
    assert scheduler.plan(21.0).chunks


# The decodes of a plan, read early and late


def decoding(*names: str, lasting: bool = False) -> Scheduler:
    """Each is to generate nine tokens, and the first of them two."""
    scheduler = make_scheduler(memory=make_memory(blocks=16, block_size=4))
    if not lasting:
        scheduler.lasting_plans = False
    for name in names:
        scheduler.add(Request(name, 4), now=0.0, output_len=2 if name == "short" else 9)
    scheduler.commit(scheduler.plan(0.0), 1.0)
    return scheduler


@pytest.mark.parametrize("lasting", [False, True])
def test_the_decodes_of_a_plan_are_read_before_the_batch_changes_unless_plans_last(
    lasting: bool,
) -> None:
    scheduler = decoding("short", "long", lasting=lasting)
    plan = scheduler.plan(1.0)
    scheduler.commit(plan, 2.0)
    if lasting:
        assert [request.id for request in plan.decodes] == ["short", "long"]
        return
    with pytest.raises(PlanError, match="the batch has changed since the plan"):
        _ = plan.decodes
    following = scheduler.plan(2.0)
    decodes = following.decodes
    assert [request.id for request in decodes] == ["long"]
    scheduler.abort("long", 2.5)
    assert following.decodes is decodes
