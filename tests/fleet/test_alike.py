"""A fleet is made of servers: what one of them does, it does alone, too."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_router, make_scheduler
from pagedsim.core import Request, Scheduler
from pagedsim.metrics.steps import FleetSteps
from policies.routing.router import Replica, Replicas, Router
from policies.routing.simple import RoundRobin
from tests.fleet.fleets import served
from tests.sim.harness import Affine, Jobs, run

KINDS = [
    {},
    {"policy": "priority", "preemption": "swap"},
    {"batching": "unified", "max_batched_tokens": 16},
    {"batching": "unified", "async_scheduling": True, "max_batched_tokens": 16},
    {"memory": "prefix", "batching": "unified"},
]


def scheduler(memory: str = "paged", **more: object) -> Scheduler:
    made = make_memory(memory, blocks=24, block_size=4, cpu_blocks=16)
    return make_scheduler(memory=made, max_seqs=8, **more)  # type: ignore[arg-type]


def rows(count: int, pace: float) -> list[tuple[float, int, int]]:
    return [(pace * n, 3 + 5 * n % 17, 2 + 7 * n % 23) for n in range(count)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("mode", ["open", "closed", "burst"])
def test_a_fleet_of_one_is_a_server(kind: dict[str, object], mode: str) -> None:
    jobs = Jobs(rows(60, 0.02), mode, users=5, think_time=0.03)  # type: ignore[arg-type]
    alone, alone_steps = run(scheduler(**kind), jobs, Affine())  # type: ignore[arg-type]
    fleet, steps = served([scheduler(**kind)], jobs, RoundRobin())  # type: ignore[arg-type]
    assert fleet.equals(alone)
    assert steps.table().equals(alone_steps)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 4),
    jobs=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 30)),
        min_size=1,
        max_size=40,
    ),
)
def test_round_robin_is_as_many_servers_apart(
    kind: dict[str, object], count: int, jobs: list[tuple[int, int, int]]
) -> None:
    all_rows = sorted((0.05 * at, prompt, output) for at, prompt, output in jobs)
    whole, steps = served(
        [scheduler(**kind) for _ in range(count)],  # type: ignore[arg-type]
        Jobs(all_rows),
        RoundRobin(),
    )
    for index in range(count):
        mine = range(index, len(all_rows), count)
        if not mine:
            continue
        alone, alone_steps = run(
            scheduler(**kind),  # type: ignore[arg-type]
            Jobs([all_rows[row] for row in mine]),
            Affine(),
        )
        part = whole.take(list(mine))
        kept = [name for name in alone.column_names if name != "request"]
        assert part.select(kept).equals(alone.select(kept))
        own = steps.replicas[index] if isinstance(steps, FleetSteps) else steps
        assert own.table().equals(alone_steps)


class ByBatch(Router):
    """Reads what is seen of batches and caches, replica by replica."""

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return min(replicas, key=lambda one: (len(one.batch), -one.cached_tokens(request)))


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 4),
    router=st.sampled_from(
        ["round_robin", "least_requests", "power_of_two", "least_tokens", "by batch"]
    ),
    staleness=st.sampled_from([0.0, 0.07]),
    jobs=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 30)),
        min_size=1,
        max_size=40,
    ),
)
def test_times_of_their_own_change_nothing(
    kind: dict[str, object],
    count: int,
    router: str,
    staleness: float,
    jobs: list[tuple[int, int, int]],
) -> None:
    all_rows = sorted((0.05 * at, prompt, output) for at, prompt, output in jobs)

    def tables(together: bool) -> tuple[pa.Table, pa.Table]:
        requests, steps = served(
            [scheduler(**kind) for _ in range(count)],  # type: ignore[arg-type]
            Jobs(all_rows),
            ByBatch() if router == "by batch" else make_router(router),
            staleness=staleness,
            together=together,
        )
        return requests, pa.Table.from_batches(steps.to_batches(), steps.schema)

    apart, together = tables(False), tables(True)
    assert apart[0].equals(together[0])
    assert apart[1].equals(together[1])
