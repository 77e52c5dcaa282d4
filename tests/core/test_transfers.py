"""The interface of transfers between the GPU and a host tier."""

import pytest

from pagedsim.core import PagedMemory, PlanError, Request, Scheduler, StepPlan, Unified
from pagedsim.core.transfers import Direction, Transfer


def test_a_step_that_begins_a_transfer_is_not_idle() -> None:
    plan = StepPlan(0, 0.0)
    assert plan.idle and plan.transfers == () and plan.flushed == ()
    plan._transfers = [Transfer(0, Direction.STORE, None, (3,), (7,))]
    assert plan.empty and not plan.idle


def test_a_transfer_that_was_never_begun_has_no_end() -> None:
    scheduler = Scheduler(memory=PagedMemory(8, 4), batching=Unified())
    scheduler.add(Request("a", prompt=6), now=0.0)
    assert not scheduler.transferring
    scheduler.transferred([], now=0.0)
    with pytest.raises(PlanError, match=r"transfers \[3\] have ended that were never begun"):
        scheduler.transferred([3], now=0.0)
