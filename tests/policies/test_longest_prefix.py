"""The longest prefix: shared beginnings, and requests that are preempted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagedsim.core import Request, ServerState
from policies.longest_prefix import LongestPrefix
from tests.policies.served import Job, served, started

SHARED = list(range(32))


def job(name: int, shared: list[int], length: int, output: int = 1) -> Job:
    """A request whose prompt begins with `shared`, and goes on with tokens of its own."""
    own = [1000 * name + place for place in range(length - len(shared))]
    return Job(prompt=shared + own, output=output)  # type: ignore[arg-type]


def test_a_beginning_that_waiting_requests_share_is_computed_once() -> None:
    """The third request, which shares nothing, starts beside the first; then the second hits."""
    jobs = [job(1, SHARED, 40), job(2, SHARED, 40), job(3, [], 40)]
    outcome = served(jobs, "longest_prefix", memory="prefix", max_seqs=2)
    assert started(outcome) == [0, 2, 1]
    assert [request.cached_tokens for request in outcome.requests] == [0, 32, 0]


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_a_batch_yields_memory_in_order_of_arrival(batching: str) -> None:
    """The last to arrive is preempted, however much of either is in the cache."""
    jobs = [job(1, [], 4, output=20), job(2, [], 40, output=12)]
    limits: dict[str, Any] = {"memory": "prefix", "blocks": 4, "block_size": 16}
    outcome = served(jobs, "longest_prefix", batching=batching, **limits)
    assert {request.id for request in outcome.requests if request.preemptions} == {1}


class Watched(LongestPrefix):
    """Counts the steps in which a preempted request waits, and those with stale ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.stale_steps = 0
        self.queued: set[Request] = set()

    def rank(self, request: Request, state: ServerState) -> tuple[int, int]:
        if request.preemptions:
            self.queued.add(request)
        return super().rank(request, state)

    def stale(self, state: ServerState) -> bool:
        answer = super().stale(state)
        if any(one.state.value == "waiting" for one in self.queued):
            self.steps += 1
            self.stale_steps += answer
        return answer


def test_a_preempted_request_that_waits_does_not_expire_all_ranks_in_each_step() -> None:
    policy = Watched()
    jobs = [job(1, [], 40, output=24), job(2, [], 40, output=24)]
    served(jobs, policy, memory="prefix", blocks=7, block_size=16, batching="unified")
    assert policy.steps > 10
    assert policy.stale_steps <= 2


def test_a_preempted_request_computes_a_beginning_before_those_that_came_after_it() -> None:
    """The first request takes the memory of the second as the third, which shares the beginning of
    the second, waits. No block of that is full yet, so that the cache changes nothing."""
    jobs = [Job(prompt=60, output=10), job(1, SHARED, 40, output=9)]
    jobs.append(replace(job(2, SHARED, 40), at=2.5))
    found = served(
        jobs, "longest_prefix", memory="prefix", blocks=2, block_size=64, batching="unified",
        max_seqs=2, max_batched_tokens=60,
    )  # fmt: skip
    assert [request.preemptions for request in found.requests] == [0, 1, 0]
    assert [chunk.request.id for chunk in found.plans[10].chunks] == [1, 2]


def test_once_few_wait_again_the_longest_prefix_goes_first_again() -> None:
    """Three wait while the second request runs, and the first of them goes first."""
    shared = [*range(64)]
    jobs = [job(1, shared, 64), Job(1.5, 4, 6), Job(2.0, 4, 1)]
    jobs += [replace(job(2, shared[:32], 70), at=2.1), replace(job(3, shared[:48], 70), at=2.2)]
    policy = LongestPrefix(most=2)
    outcome = served(jobs, policy, memory="prefix", block_size=16, max_seqs=1)
    assert started(outcome) == [0, 1, 2, 4, 3]
