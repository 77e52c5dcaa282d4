"""The router's view: running sums, against sums over all requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import PagedsimError, Request, Scheduler
from pagedsim.fleet.failures import ListedOutages
from policies.routing.router import Refusal, Replica, Replicas, Router
from policies.routing.simple import RoundRobin
from tests.fleet.fleets import served
from tests.sim.harness import Constant, Jobs

KINDS: list[dict[str, Any]] = [
    {},
    {"batching": "unified", "max_batched_tokens": 16},
    {"batching": "unified", "async_scheduling": True, "max_batched_tokens": 16},
    {"policy": "priority", "preemption": "swap"},
    {"memory": "prefix", "batching": "unified"},
]


def scheduler(memory: str = "paged", **more: Any) -> Scheduler:
    made = make_memory(memory, blocks=24, block_size=4, cpu_blocks=16)
    return make_scheduler(memory=made, max_seqs=6, **more)


class Watches(RoundRobin):
    """Holds what it sees against what is there."""

    def __init__(self, schedulers: list[Scheduler]) -> None:
        super().__init__()
        self.schedulers = schedulers
        self.looks = 0

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        for replica, scheduler in zip(replicas, self.schedulers, strict=True):
            alive = scheduler.requests.values()
            assert replica.requests == len(alive)
            assert replica.waiting == len(scheduler.waiting)
            assert replica.running == len(scheduler.running)
            assert replica.wanted_blocks == sum(
                scheduler.memory.blocks_for(one.num_tokens) for one in scheduler.waiting
            )
            decoding = [one for one in scheduler.running if one.decoding]
            assert replica.stored_tokens == sum(one.num_tokens for one in decoding)
            owed = sum(
                one.num_tokens - one.computed
                for one in alive
                if one not in decoding and one.state.value != "swapped"
            )
            if scheduler.async_scheduling:  # a step in flight completes at its end
                assert alive or replica.owed_tokens == 0
            else:
                under_way = scheduler.pending.prefill_tokens if scheduler.pending else 0
                assert replica.owed_tokens in (owed, owed + under_way)
            promised = sum(one.predicted_len or one.max_tokens or 0 for one in alive)
            done = sum(one.generated for one in decoding)
            assert replica.predicted_tokens == max(promised - done, 0)
            self.looks += 1
        return super().route(request, replicas, now)


@settings(max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    together=st.booleans(),
    jobs=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 30)),
        min_size=1,
        max_size=30,
    ),
)
def test_kept_sums_are_what_a_walk_finds(
    kinds: list[dict[str, Any]], together: bool, jobs: list[tuple[int, int, int]]
) -> None:
    rows = sorted((0.05 * at, prompt, output) for at, prompt, output in jobs)
    schedulers = [scheduler(**kind) for kind in kinds]
    router = Watches(schedulers)
    served(schedulers, Jobs(rows), router, together=together)
    assert router.looks == len(rows) * len(kinds)


class Answers(Router):
    """Always the same."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def route(self, request: Request, replicas: Replicas, now: float) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "Answers.route returned None: a router that queues requests must set holds = True"),
        ("replica-0", "Answers.route gave 'replica-0': must be one of the replicas"),
    ],
)
def test_an_answer_that_is_none_is_refused(answer: object, said: str) -> None:
    with pytest.raises(PagedsimError, match=said):
        served([scheduler(), scheduler()], Jobs([(0.0, 4, 3)]), Answers(answer))


def test_a_router_that_returns_none_for_an_idle_fleet_is_an_error() -> None:
    router = Answers(None)
    router.holds = True  # type: ignore[misc]
    with pytest.raises(PagedsimError, match="returned None although every replica is idle"):
        served([scheduler(), scheduler()], Jobs([(0.0, 4, 3)]), router)


def test_a_refused_request_is_recorded() -> None:
    requests, _ = served(
        [scheduler(), scheduler()], Jobs([(0.0, 4, 3)]), Answers(Refusal("too busy")), Constant()
    )
    assert requests["state"].to_pylist() == ["rejected"]
    assert requests["reason"].to_pylist() == ["too busy"]


class Alike(Jobs):
    """All prompts begin alike."""

    def requests(self) -> Any:
        for request, output in super().requests():
            yield Request(request.id, range(request.prompt_len), arrival=request.arrival), output


@pytest.mark.parametrize("died", [2.5, 10.5, 13.5])
def test_kept_sums_begin_anew_where_a_replica_has_died(died: float) -> None:
    """Memory runs out, so some waiting requests had begun; later cache hits of theirs are new."""
    one = scheduler(memory="prefix", batching="unified", max_batched_tokens=24)
    router = Watches([one])
    jobs = Alike([(0.37 * n, 20, 24) for n in range(40)])
    served([one], jobs, router, Constant(), failures=ListedOutages({0: [(died, 0.25)]}))
    assert router.looks > 40
