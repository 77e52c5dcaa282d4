"""Steps in which a policy could change its mind, and does not, are not planned one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from pagedsim.build import make_memory, make_policy, make_scheduler
from pagedsim.core import (
    Policy,
    PrefillFirst,
    Request,
    SamplingParams,
    Scheduler,
    ServerState,
    StepPlan,
)
from pagedsim.core.errors import PolicyError
from pagedsim.core.policy import RankChanges
from pagedsim.core.request import Rank
from policies.admission import Reserve
from policies.fairness import VTC
from policies.mlfq import MLFQ
from policies.ordering import EDF, HRRN, SRPT
from policies.past_future import PastFuture
from tests.core.odd_policies import Aging, ShortestRemaining, SmallBatches

LONG = 40
"""Tokens of each output: as many steps pass until any request ends."""


def waiting(policy: Policy, batching: str = "prefill_first", prompt: int = 8) -> Scheduler:
    """Two decode, and a third, who came later, waits: for memory, if its prompt is long."""
    scheduler = make_scheduler(
        memory=make_memory(blocks=64, block_size=4), policy=policy, batching=batching
    )
    for number, size in enumerate((40, 40, prompt)):
        request = Request(number, size, SamplingParams(max_tokens=LONG, temperature=0.0))
        request.client, request.priority, request.deadline = "abc"[number], number, 1e6 + number
        request.predicted_len = LONG + number
        scheduler.add(request, scheduler.now, output_len=LONG)
        scheduler.commit(scheduler.plan(scheduler.now), scheduler.now + 1.0)
    for _ in range(2):
        scheduler.commit(scheduler.plan(scheduler.now), scheduler.now + 1.0)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)
    return scheduler


def glided(scheduler: Scheduler) -> tuple[int, StepPlan]:
    """How many steps are repeated after one that is planned now; and that one."""
    plan = scheduler.plan(scheduler.now)
    steps, quiet = 0, scheduler.uneventful(plan)
    while steps < quiet and scheduler.fast_forward(plan, scheduler.now + 1.0):
        steps += 1
    return steps, plan


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize(
    "make",
    [HRRN, VTC, SRPT, lambda: MLFQ(displace=False), lambda: EDF(shed=True), Aging],
)
def test_who_lacks_memory_is_looked_at_and_no_step_is_planned(
    make: Callable[[], Policy], batching: str
) -> None:
    assert glided(waiting(make(), batching, prompt=180))[0] > 20


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize("make", [lambda: SmallBatches(2), Reserve, PastFuture])
def test_who_may_not_start_is_looked_at_and_no_step_is_planned(
    make: Callable[[], Policy], batching: str
) -> None:
    assert glided(waiting(make(), batching, prompt=100))[0] > 20


class Opening(Policy):
    """Admits no request beside another until a certain time."""

    asked = 0

    def admit(self, request: Request, state: ServerState) -> bool:
        self.asked += 1
        return not state.batch_size or request.id == 1 or state.now >= 12.0


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_who_may_start_at_last_starts_in_that_step(batching: str) -> None:
    scheduler = waiting(policy := Opening(), batching)
    policy.asked = 0
    steps, _ = glided(scheduler)
    assert scheduler.now == 12.0 and steps == policy.asked - 2
    assert [chunk.request.id for chunk in scheduler.plan(12.0).chunks] == [2]


class Rising(Policy):
    """From a certain time on, the last who came goes first; it counts how often it was asked."""

    rank_changes: RankChanges = "when stale"

    def __init__(self, displacing: bool) -> None:
        self.displacing = displacing
        self.late: list[Request] = []
        self.asked = 0

    def rank(self, request: Request, state: ServerState) -> Rank:
        if request.id == 2:
            self.late = [request]
        return -1.0 if request.id == 2 and state.now >= 12.0 else 0.0

    def stale(self, state: ServerState) -> Collection[Request]:
        self.asked += 1
        return self.late if state.now == 12.0 else ()


def test_a_stale_rank_ends_quiet_steps_and_is_asked_for_once() -> None:
    scheduler = waiting(policy := Rising(displacing=True), prompt=180)
    policy.asked = 0
    steps, _ = glided(scheduler)
    plan = scheduler.plan(scheduler.now)
    assert scheduler.now == 12.0 and policy.asked == steps + 2
    assert plan.displaced and scheduler.waiting.head.id == 2


class Muddled(Rising):
    """Ranks with a number, and later with a tuple."""

    def rank(self, request: Request, state: ServerState) -> Rank:
        return (-1.0,) if super().rank(request, state) == -1.0 else 0.0


def test_ranks_that_cannot_be_compared_are_said_so_in_a_quiet_step() -> None:
    scheduler = waiting(Muddled(displacing=False), prompt=180)
    scheduler.add(Request(3, 180), scheduler.now, output_len=LONG)
    with pytest.raises(PolicyError, match="must be numbers for all, or tuples for all"):
        glided(scheduler)


class Pushing(Policy):
    """From a certain time on, request 2 may displace others."""

    displacing = True

    def may_preempt(self, waiting: Request, running: Request, state: ServerState) -> bool:
        return state.now >= 12.0


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_request_that_may_displace_others_at_last_does_so_in_that_step(batching: str) -> None:
    scheduler = waiting(Pushing(), batching, prompt=180)
    steps, _ = glided(scheduler)
    assert scheduler.now == 12.0 and steps > 0
    assert scheduler.plan(12.0).displaced


@pytest.mark.parametrize(
    "limits",
    [{"max_seqs": 2}, {"batching": PrefillFirst(max_wait_tokens=30)}],
    ids=["no seat is free", "the batch is closed"],
)
def test_a_request_displaces_others_in_that_step_where_none_could_start(
    limits: dict[str, Any],
) -> None:
    scheduler = make_scheduler(
        memory=make_memory(blocks=64, block_size=4), policy=Pushing(), **limits
    )
    for number, size in enumerate((40, 40, 180)):
        scheduler.add(Request(number, size), scheduler.now, output_len=LONG)
        if number:
            scheduler.commit(scheduler.plan(scheduler.now), scheduler.now + 1.0)
    while not (plan := scheduler.plan(scheduler.now)).displaced and scheduler.now < LONG:
        steps, quiet = 0, scheduler.uneventful(plan)
        while steps < quiet and scheduler.fast_forward(plan, scheduler.now + 1.0):
            steps += 1
        if steps == quiet:
            scheduler.commit(plan, scheduler.now + 1.0)
    assert scheduler.now == 12.0


class Falling(Policy):
    """From a certain time on, request 0, the first of the batch, goes last."""

    rank_changes: RankChanges = "when stale"
    displacing = True

    def __init__(self) -> None:
        self.first: list[Request] = []

    def rank(self, request: Request, state: ServerState) -> Rank:
        if request.id == 0:
            self.first = [request]
            return 9 if state.now >= 12.0 else 0
        return {1: 1, 2: 5}[int(request.id)]

    def stale(self, state: ServerState) -> Collection[Request]:
        return self.first if state.now == 12.0 else ()


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_running_request_that_falls_back_is_displaced_in_that_step(batching: str) -> None:
    scheduler = waiting(Falling(), batching, prompt=180)
    steps, _ = glided(scheduler)
    assert scheduler.now == 12.0 and steps > 0
    assert [one.id for one in scheduler.plan(12.0).displaced][:1] == [0]


class Shedding(Policy):
    """From a certain time on, no request is served that has not run yet."""

    def should_reject(self, request: Request, state: ServerState) -> str | None:
        return "late" if state.now >= 12.0 else None


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_request_that_is_shed_at_last_leaves_in_that_step(batching: str) -> None:
    scheduler = waiting(Shedding(), batching, prompt=180)
    steps, _ = glided(scheduler)
    assert scheduler.now == 12.0 and steps > 0
    assert [one.request.id for one in scheduler.plan(12.0).rejected] == [2]


@pytest.mark.parametrize(("policy", "skips"), [(Policy, True), (Aging, False), (HRRN, False)])
def test_no_step_is_skipped_while_memory_is_asked_for_in_an_order_that_changes(
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


def test_a_batch_that_is_put_in_order_in_each_step_is_planned_in_each() -> None:
    assert glided(waiting(ShortestRemaining(displace=True), prompt=180))[0] == 0


@pytest.mark.parametrize("skips", [False, True])
def test_a_request_held_back_by_a_swapped_one_displaces_the_last_once_its_room_is_gone(
    skips: bool,
) -> None:
    """The newcomer fits, but the swapped request, which does not, precedes it; and so it displaces
    nothing until the batch has grown into its room."""
    scheduler = make_scheduler(
        memory=make_memory(blocks=24, block_size=4, cpu_blocks=40),
        policy=make_policy("priority", displace=True, victim="largest"),
        preemption="swap",
        batching="unified",
    )

    def add(name: str, prompt: int, priority: int) -> None:
        scheduler.add(Request(name, prompt, priority=priority), scheduler.now, output_len=60)

    for name, prompt, priority in (("first", 2, 0), ("swapped", 28, 1), ("last", 9, 3)):
        add(name, prompt, priority)
    while not (plan := scheduler.plan(scheduler.now)).preempted:
        scheduler.commit(plan, scheduler.now + 1.0)
    assert [(one.id, one.state.value) for one in plan.preempted] == [("swapped", "swapped")]
    scheduler.commit(plan, scheduler.now + 1.0)
    add("newcomer", 6, 2)
    while not (plan := scheduler.plan(scheduler.now)).displaced:
        steps, quiet = 0, scheduler.uneventful(plan) if skips else 0
        while steps < quiet and scheduler.fast_forward(plan, scheduler.now + 1.0):
            steps += 1
        if steps == quiet:
            scheduler.commit(plan, scheduler.now + 1.0)
    assert (scheduler.now, [one.id for one in plan.displaced]) == (39.0, ["last"])


class Overtaking(Policy):
    """The largest yields; the newcomer ranks behind all, and from 30 s on before them."""

    rank_changes: RankChanges = "when stale"

    def __init__(self) -> None:
        self.late: list[Request] = []

    def rank(self, request: Request, state: ServerState) -> Rank:
        if request.id != "newcomer":
            return 0.0
        self.late = [request]
        return 1.0 if state.now < 30.0 else -1.0

    def stale(self, state: ServerState) -> Collection[Request]:
        return self.late if state.now == 30.0 else ()

    def choose_victim(
        self, running: Sequence[Request], needy: Request, state: ServerState
    ) -> Request:
        return max(running, key=lambda request: request.num_tokens)


@pytest.mark.parametrize("skips", [False, True])
def test_a_request_that_fits_starts_in_the_step_in_which_it_ranks_before_a_swapped_one(
    skips: bool,
) -> None:
    scheduler = make_scheduler(
        memory=make_memory(blocks=24, block_size=4, cpu_blocks=40),
        policy=Overtaking(),
        preemption="swap",
        batching="unified",
    )

    def step(plan: StepPlan) -> None:
        steps, quiet = 0, scheduler.uneventful(plan) if skips else 0
        while steps < quiet and scheduler.fast_forward(plan, scheduler.now + 1.0):
            steps += 1
        if steps == quiet:
            scheduler.commit(plan, scheduler.now + 1.0)

    for name, prompt in (("first", 2), ("swapped", 28), ("last", 9)):
        scheduler.add(Request(name, prompt), scheduler.now, output_len=60)
    while not scheduler.swapped:
        step(scheduler.plan(scheduler.now))
    newcomer = Request("newcomer", 6)
    scheduler.add(newcomer, scheduler.now, output_len=60)
    while newcomer.scheduled_at is None:
        step(scheduler.plan(scheduler.now))
    assert newcomer.scheduled_at == 30.0 and scheduler.swapped


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
