"""Which request yields its memory under each rule."""

from __future__ import annotations

import pytest

from pagedsim.build import make_memory, make_policy, make_scheduler
from pagedsim.core import Request, SamplingParams, Scheduler

# Prompt, steps in which it has generated when memory is full, and predicted output.
BATCH = {"first": (4, 13, 20), "second": (16, 5, 18), "third": (8, 2, 9)}


def full(victim: str, predicted: bool) -> Scheduler:
    """A server on which three decode until their memory is full."""
    memory = make_memory("paged", blocks=15, block_size=4)
    scheduler = make_scheduler(memory=memory, policy=make_policy("fcfs", victim=victim))
    most = max(steps for _, steps, _ in BATCH.values())
    for now in range(most):
        for name, (prompt, steps, guess) in BATCH.items():
            if now == most - steps:
                request = Request(name, prompt, SamplingParams(max_tokens=guess))
                request.predicted_len = guess if predicted else None
                scheduler.add(request, now, 30)
        scheduler.commit(scheduler.plan(now), now + 1.0)
    return scheduler


@pytest.mark.parametrize("predicted", [True, False])
@pytest.mark.parametrize(
    ("victim", "yields"),
    [
        ("last", "third"),
        ("rank", "third"),
        ("longest", "second"),  # 13 left, of 18; the first has 7 left, of 20
        ("cheapest", "third"),
        ("largest", "second"),
    ],
)
def test_the_victim_is_the_one_that_the_rule_names(
    victim: str, yields: str, predicted: bool
) -> None:
    scheduler = full(victim, predicted)
    while not (preempted := (plan := scheduler.plan(scheduler.now)).preempted):
        scheduler.commit(plan, scheduler.now + 1.0)
    assert [request.id for request in preempted] == [yields]
