"""The checks for authors of components pass what is right, and name what is wrong."""

from __future__ import annotations

import pytest

from pagedsim.build import BATCHINGS, make_batching, make_memory, make_scheduler
from pagedsim.core import Batching, PrefillFirst, Request, Scheduler, StepPlan, Unified
from pagedsim.core.queues import Queues
from pagedsim.testing import check_batching


class Margin(PrefillFirst):
    """SGLang's rule: keeps free a share of what running requests may still need."""

    def margin(self, queues: Queues) -> int:
        left = ((one.predicted_len or 0) - one.generated for one in queues.running)
        return sum(map(queues.memory.blocks_for, map(int, left))) // 2


class MarginByLengths(Margin):
    admission_changes = "while decoding"


class MarginOverstated(Margin):
    admission_changes = "never"


class Leaking(Unified):
    admission_changes = "never"

    def compose(self, queues: Queues, plan: StepPlan) -> None:
        super().compose(queues, plan)
        queues.clock.num_seqs += plan.number == 3


@pytest.mark.parametrize("name", BATCHINGS)
def test_the_batchings_of_pagedsim_state_truly_what_they_depend_on(name: str) -> None:
    check_batching(lambda: make_batching(name), cases=20)


@pytest.mark.parametrize("kind", [Margin, MarginByLengths])
def test_a_batching_without_a_value_or_with_a_true_one_gives_equal_results(
    kind: type[Batching],
) -> None:
    check_batching(kind, cases=20)


def test_a_batching_that_overstates_is_named_with_the_first_difference() -> None:
    with pytest.raises(AssertionError, match=r"MarginOverstated.admission_changes='never': .* row"):
        check_batching(MarginOverstated)


def test_a_broken_invariant_is_named() -> None:
    with pytest.raises(AssertionError, match=r"Leaking: the clock .* in case \d+: memory="):
        check_batching(Leaking)


def blocked(batching: Batching) -> Scheduler:
    """One request decodes; another waits for memory."""
    scheduler = make_scheduler(memory=make_memory(blocks=30, block_size=4), batching=batching)
    for number in range(2):
        request = Request(number, 70, predicted_len=20.0)
        scheduler.add(request, 0.0, output_len=20)
    scheduler.commit(scheduler.plan(0.0), 1.0)
    return scheduler


@pytest.mark.parametrize(("kind", "skips"), [(Margin, False), (MarginByLengths, True)])
def test_steps_are_skipped_only_by_what_the_class_itself_states(
    kind: type[Batching], skips: bool
) -> None:
    scheduler = blocked(kind())
    assert len(scheduler.running) == len(scheduler.waiting) == 1
    plan = scheduler.plan(1.0)
    assert (scheduler.uneventful(plan) > 0) is skips
