"""A request whose last token is in flight, under async scheduling."""

from typing import Any

from pagedsim.core import PagedMemory, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.core.batching import Unified
from pagedsim.core.request import RequestId
from pagedsim.policies.preemption import Swap

TOKEN = 7


def make_scheduler(blocks: int, **settings: Any) -> Scheduler:
    return Scheduler(
        memory=PagedMemory(blocks, block_size=2, cpu_blocks=4),
        batching=Unified(),
        preemption=Swap(),
        async_scheduling=True,
        **settings,
    )


def request(name: str, prompt: int, output: int) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=output))


def dispatched(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    scheduler.dispatch(plan)
    scheduler.check()
    return plan


def completed(scheduler: Scheduler, plan: StepPlan) -> list[RequestId]:
    """The requests that end when each in the step has got its token."""
    sampling = [*plan.decodes, *(chunk.request for chunk in plan.chunks)]
    tokens = {one.id: TOKEN for one in sampling}
    ended = scheduler.complete(plan, 0.0, tokens)
    scheduler.check()
    return [one.id for one in ended]


def test_it_keeps_its_seat_until_that_token_has_come() -> None:
    scheduler = make_scheduler(blocks=8, max_seqs=1)
    scheduler.add(request("first", 4, 2), 0.0)
    scheduler.add(request("second", 4, 2), 0.0)
    prefill, decode = dispatched(scheduler), dispatched(scheduler)
    assert completed(scheduler, prefill) == []
    assert [one.id for one in scheduler.running] == ["first"] and scheduler.runnable
    passed_over = dispatched(scheduler)
    assert passed_over.empty and len(scheduler.waiting) == 1
    assert completed(scheduler, decode) == ["first"]
    assert [one.id for one, _ in dispatched(scheduler).hits] == ["second"]


def test_it_may_be_preempted_and_gets_that_token_all_the_same() -> None:
    scheduler = make_scheduler(blocks=3)
    ends = request("ends", 1, 2)
    scheduler.add(request("grows", 3, 3), 0.0)
    scheduler.add(ends, 0.0)
    prefill, decode = dispatched(scheduler), dispatched(scheduler)
    assert completed(scheduler, prefill) == []
    tight = dispatched(scheduler)
    # Its blocks are merely freed: nothing will be computed in a copy of them.
    assert tight.preempted == (ends,) and not tight.swap_out
    assert list(scheduler.waiting) == [ends]
    assert completed(scheduler, decode) == ["ends"]
    assert ends.outputs == [[TOKEN, TOKEN]] and not scheduler.waiting
