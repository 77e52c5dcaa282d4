"""Who decodes in a plan, asked early and late."""

from collections.abc import Callable

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import PlanError, Request, Scheduler, StepPlan


def two_steps(lasting: bool) -> tuple[Scheduler, StepPlan]:
    """After a decode of two requests, with which the first has ended."""
    scheduler = make_scheduler(memory=make_memory(blocks=8, block_size=4))
    scheduler.lasting_plans = lasting
    scheduler.add(Request("short", 4), now=0.0, output_len=2)
    scheduler.add(Request("long", 4), now=0.0, output_len=9)
    scheduler.commit(scheduler.plan(0.0), 1.0)
    plan = scheduler.plan(1.0)
    ended = scheduler.commit(plan, 2.0)
    assert [request.id for request in ended] == ["short"]
    return scheduler, plan


def test_a_plan_says_who_decoded_when_it_is_over() -> None:
    assert [request.id for request in two_steps(lasting=True)[1].decodes] == ["short", "long"]


def test_a_plan_that_does_not_last_is_asked_before_the_batch_changes_or_refuses() -> None:
    scheduler, plan = two_steps(lasting=False)
    with pytest.raises(PlanError, match="the batch has changed since the plan"):
        _ = plan.decodes
    following = scheduler.plan(2.0)
    assert following.decode_count == 1
    decodes = following.decodes
    assert [request.id for request in decodes] == ["long"]
    scheduler.abort("long", 2.5)
    assert following.decodes is decodes


def one_away() -> tuple[Scheduler, Request]:
    """Two decode; a third has parted, and its blocks are kept."""
    scheduler, requests = make_scheduler(memory=make_memory(blocks=16, block_size=4)), []
    scheduler.lasting_plans = False
    for name in ("one", "two", "three"):
        requests.append(Request(name, 4))
        scheduler.add(requests[-1], now=0.0, output_len=9)
    scheduler.commit(scheduler.plan(0.0), 1.0)
    scheduler.migration.detach(requests[-1], 1.0)
    return scheduler, requests[-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda scheduler, away: scheduler.migration.attach(away, 1.5, 9),
        lambda scheduler, away: scheduler.migration.detach(scheduler.requests["one"], 1.5),
        lambda scheduler, away: scheduler.withdraw(scheduler.requests["one"], 1.5),
        lambda scheduler, away: scheduler.abort("one", 1.5),
    ],
    ids=["board", "part", "withdraw", "abort"],
)
def test_who_comes_or_goes_while_a_step_runs_does_not_change_who_decodes_in_it(
    change: Callable[[Scheduler, Request], object],
) -> None:
    scheduler, away = one_away()
    plan = scheduler.plan(1.0)
    change(scheduler, away)
    assert [request.id for request in plan.decodes] == ["one", "two"]
    scheduler.commit(plan, 2.0)
    scheduler.check()


def test_a_plan_without_decodes_has_none_at_any_time() -> None:
    scheduler = make_scheduler(memory=make_memory(blocks=8, block_size=4))
    scheduler.lasting_plans = False
    scheduler.add(Request("one", 4), now=0.0, output_len=2)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, 1.0)
    assert plan.decodes == ()
