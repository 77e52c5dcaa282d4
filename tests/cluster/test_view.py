"""The router's view: running sums against sums over all requests, old counts, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.cluster.failures import ListedOutages
from pagedsim.cluster.link import Network
from pagedsim.core import PagedsimError, Request, SamplingParams, Scheduler
from pagedsim.core.plan import prefill_left
from pagedsim.policies.routing.router import Refusal, Replica, Replicas, Router
from pagedsim.policies.routing.simple import Central, RoundRobin
from tests.cluster.fleets import Alike, served, server
from tests.sim.harness import Affine, Constant, Jobs

scheduler = partial(server, blocks=24, max_seqs=6)
KINDS: list[dict[str, Any]] = [
    {},
    {"batching": "unified", "max_batched_tokens": 16},
    {"batching": "unified", "async_scheduling": True, "max_batched_tokens": 16},
    {"async_scheduling": True, "blocks": 17},
    {"policy": "priority", "preemption": "swap"},
    {"policy": "sjf", "preemption": "swap", "batching": "unified", "max_batched_tokens": 16},
    {"memory": "prefix", "batching": "unified"},
]


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
                scheduler.memory.blocks_for(request.num_tokens) for request in scheduler.waiting
            )
            decoding = [request for request in scheduler.running if request.decoding]
            assert replica.stored_tokens == sum(
                request.num_seqs * request.num_tokens for request in decoding
            )
            owed = sum(
                prefill_left(one, scheduler.memory)
                for one in alive
                if one not in decoding and not one.ready
            )
            if scheduler.async_scheduling:  # a step in flight completes at its end
                assert bool(alive) >= bool(replica.owed_tokens)
            else:
                under_way = scheduler.pending.prefill_tokens if scheduler.pending else 0
                assert replica.owed_tokens in (owed, owed + under_way)
            promised = sum(one.predicted_len or one.max_tokens or 0 for one in alive)
            done = sum(one.generated for one in decoding)
            assert replica.predicted_tokens == pytest.approx(max(promised - done, 0), abs=1e-9)
            self.looks += 1
        return super().route(request, replicas, now)


@dataclass
class Groups(Jobs):
    """Some requests are of `width` sequences."""

    width: int = 1

    def requests(self) -> Any:
        for request, output in super().requests():
            params = SamplingParams(n=1 + int(request.id) % self.width)
            made = Request(request.id, request.prompt_len, params, arrival=request.arrival)
            made._predicted_len = 0.1 * output
            yield made, output


@settings(max_examples=40)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    together=st.booleans(),
    width=st.integers(1, 3),
    jobs=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 30)),
        min_size=1,
        max_size=30,
    ),
)
def test_kept_sums_are_what_a_walk_finds(
    kinds: list[dict[str, Any]], together: bool, width: int, jobs: list[tuple[int, int, int]]
) -> None:
    rows = sorted((0.05 * at, prompt, output) for at, prompt, output in jobs)
    schedulers = [scheduler(**kind) for kind in kinds]
    router = Watches(schedulers)
    served(schedulers, Groups(rows, width=width), router, together=together)
    assert router.looks == len(rows) * len(kinds)


@pytest.mark.parametrize("died", [2.5, 10.5, 13.5])
def test_kept_sums_begin_anew_where_a_replica_has_died(died: float) -> None:
    """Memory runs out, so some waiting requests had begun; later cache hits of theirs are new."""
    one = scheduler(memory="prefix", batching="unified", max_batched_tokens=24)
    router = Watches([one])
    jobs = Alike([(0.37 * n, 20, 24) for n in range(40)])
    served([one], jobs, router, Constant(), failures=ListedOutages({0: [(died, 0.25)]}))
    assert router.looks > 40


# -- answers of a router ---------------------------------------------------------------------------


class Refuses(Router):
    def route(self, request: Request, replicas: Replicas, now: float) -> Refusal:
        return Refusal("too busy")


def test_a_refused_request_is_recorded() -> None:
    requests, _ = served([scheduler(), scheduler()], Jobs([(0.0, 4, 3)]), Refuses(), Constant())
    assert requests["state"].to_pylist() == ["rejected"]
    assert requests["reason"].to_pylist() == ["too busy"]


def test_times_are_those_of_the_cost_model() -> None:
    class Asks(RoundRobin):
        def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
            (replica,) = replicas
            self.told = [replica.prefill_seconds(9), replica.prefill_seconds(9, 30)]
            self.told.append(replica.decode_seconds(4, 70))
            return replica

    router = Asks()
    served([scheduler()], Jobs([(0.0, 3, 4)]), router, Affine())
    fixed = Affine().decode_seconds(0, 0)
    prefills = [1e-4 * 9 + 3e-8 * 9 * context + fixed for context in (9, 39)]
    assert router.told == pytest.approx([*prefills, Affine().decode_seconds(4, 70)], rel=1e-12)


# -- old counts ------------------------------------------------------------------------------------


def finished(
    rows: list[tuple[float, int, int]],
    router: Router,
    staleness: float,
    roles: tuple[str, ...] = ("both",),
) -> list[float]:
    """When requests are finished; a step takes a second, and a transfer no time."""
    units = [server(max_seqs=4, batching="unified") for _ in roles]
    network = Network(1e9)
    requests, _ = served(
        units, Jobs(rows), router, Constant(), roles, staleness=staleness, network=network
    )
    assert requests["state"].unique().to_pylist() == ["finished"]
    times: list[float] = requests["finished"].to_pylist()
    return times


@pytest.mark.parametrize(
    ("staleness", "starts"),
    [
        (0.0, 4.0),
        (1.5, 4.0),  # old enough at 4 to be looked at again
        (2.5, 5.0),
    ],
)
def test_a_request_held_by_old_counts_is_routed_when_they_are_renewed(
    staleness: float, starts: float
) -> None:
    """At 2.5 one request is seen; it leaves at 4, which is seen `staleness` after 2.5."""
    rows = [(0.0, 3, 4), (2.5, 3, 4)]
    assert finished(rows, Central(slots=1), staleness) == [4.0, starts + 4.0]


class Never(Router):
    """Only the first request is served; counts are read each time."""

    holds = True

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica | None:
        return None if replicas[0].requests or request.id else replicas[0]


def test_renewals_end_where_the_router_holds_a_request_for_ever() -> None:
    with pytest.raises(PagedsimError, match=r"1 at the router \(Never returned no replica\)"):
        finished([(0.0, 3, 4), (2.5, 3, 4)], Never(), 2.0)
