"""Whatever a fleet is made of and whatever happens to it: no request is lost, or served twice.

One of its servers does what it does alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.build import make_router
from pagedsim.cluster.failures import ListedOutages, RandomOutages
from pagedsim.cluster.kv_migration import AFTER_DEATH
from pagedsim.cluster.link import Network
from pagedsim.cluster.prefix_fetch import FETCHES
from pagedsim.cluster.view import ReplicaView
from pagedsim.core import Request
from pagedsim.core.source import Mode
from pagedsim.metrics.steps import FleetSteps
from pagedsim.policies.routing.llumnix import Llumnix
from pagedsim.policies.routing.prefix_aware import PrefixAware
from pagedsim.policies.routing.router import Replica, Replicas, Router
from pagedsim.policies.routing.simple import (
    Central,
    LeastRequests,
    LeastTokens,
    LeastWork,
    PowerOfTwo,
    RoundRobin,
    Uniform,
)
from pagedsim.policies.routing.sticky import Sticky
from pagedsim.policies.routing.vllm_dp import VllmDP
from pagedsim.workload import Sessions
from tests.cluster.fleets import Alike, rule, served, server, whole
from tests.sim.harness import Affine, Constant, Jobs, run

ROUTERS: dict[str, Callable[[], Router]] = {
    "central": Central,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "least_work": LeastWork,
    "llumnix": lambda: Llumnix(migration=False),
    "migrating": lambda: Llumnix(every=0.11),
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
    "round_robin": RoundRobin,
    "sticky": Sticky,
    "random": Uniform,
    "vllm_dp": VllmDP,
}
COUNTS = (
    *("waiting", "running", "swapped", "requests", "wanted_blocks"),
    *("stored_tokens", "predicted_tokens", "batch"),
)
"""What a router sees of requests; `owed_tokens` as well, once the last step is over."""
replicas = st.fixed_dictionaries(
    {
        "blocks": st.integers(17, 40),
        "memory": st.sampled_from(["paged", "prefix"]),
        "policy": st.sampled_from(["fcfs", "priority", "sjf", "mlfq", "srpt"]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "batching": st.sampled_from(["prefill_first", "unified"]),
        "max_seqs": st.integers(1, 8),
        "async_scheduling": st.booleans(),
    }
)
rows = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40
)
networks = st.builds(
    Network,
    st.sampled_from([4e-8, 1e-6]),
    sharing=st.sampled_from(["fifo", "fair"]),
    layerwise=st.booleans(),
    failure_rate=st.sampled_from([0.0, 0.3]),
    retries=st.just(1),
    timeout_s=st.just(0.1),
)
rules = st.sampled_from(
    [
        None,
        rule("queue", up=1.0, down=0.5, interval_s=0.2, startup_s=0.1),
        rule("kv", up=0.5, down=0.2, interval_s=0.3, startup_s=0.0),
        rule("freeness", up=3.0, down=6.0, interval_s=0.1, startup_s=0.5),
    ]
)
chances = st.sampled_from(
    [
        None,
        RandomOutages(0.7, 0.2),
        RandomOutages(2.0, 1.0, seed=3),
        ListedOutages({0: [(0.5, 0.25), (2.25, 0.5)], 1: [(1.0, 0.125)]}),
    ]
)
costs = st.sampled_from([Affine(), Affine(), Constant(0.25, block=0.0625)])
"""Of the last, steps end when replicas are listed to die, or blocks move then."""
PARTS: dict[str, Any] = {
    "kinds": st.lists(replicas, min_size=1, max_size=5),
    "roles": st.none() | st.lists(st.sampled_from(["both", "prefill", "decode"]), max_size=3),
    "network": networks,
    "on_receiver_death": st.sampled_from(AFTER_DEATH),
    "fetch": st.sampled_from(FETCHES),
    "rows": rows,
    "alike": st.booleans(),
    "mode": st.sampled_from(["open", "closed", "burst"]),
    "sessions": st.none() | st.integers(1, 4),
    "router": st.sampled_from(sorted(ROUTERS)),
    "staleness": st.sampled_from([0.0, 0.1]),
    "failures": chances,
    "autoscale": rules,
    "cost": costs,
    "overlap": st.booleans(),
    "seed": st.integers(0, 3),
}
fleets = st.fixed_dictionaries(PARTS)
full = st.fixed_dictionaries(
    PARTS
    | {
        "kinds": st.lists(replicas.map(lambda kind: kind | {"blocks": 17}), min_size=1, max_size=2),
        "network": st.just(Network(1e-6, failure_rate=0.5, retries=0, timeout_s=0.1)),
        "rows": st.lists(
            st.tuples(st.integers(0, 9), st.integers(9, 20), st.integers(5, 30)),
            min_size=9,
            max_size=20,
        ),
        "mode": st.just("open"),
        "sessions": st.none(),
    }
)
"""Fleets with little memory, whose requests are preempted and lost in transfer."""


@dataclass
class Turns(Jobs):
    """Jobs of some sessions, each of which goes on from the one before."""

    sessions: int = 1

    def __post_init__(self) -> None:
        rows = range(len(self.rows))
        after = [[row - self.sessions] if row >= self.sessions else [] for row in rows]
        keys = [row % self.sessions for row in rows]
        turns = [row // self.sessions + 1 for row in rows]
        self.turns: Any = Sessions(keys, turns, after, [0.03] * len(rows))

    def requests(self) -> Iterator[tuple[Request, int]]:
        for request, output in super().requests():
            request._session = str(int(request.id) % self.sessions)
            yield request, output


def load(fleet: dict[str, Any]) -> Jobs:
    sizes = sorted((0.05 * at, prompt, output) for at, prompt, output in fleet["rows"])
    if fleet["sessions"] is not None:
        return Turns(sizes, priorities=(0, 1), sessions=fleet["sessions"])
    kind = Alike if fleet["alike"] else Jobs
    return kind(sizes, fleet["mode"], users=3, think_time=0.05, priorities=(0, 1))


def holds(fleet: dict[str, Any]) -> None:
    roles = fleet["roles"]
    kinds = fleet["kinds"]
    if roles is not None:
        roles = [*roles, "prefill", "decode"]
        kinds = [kinds[number % len(kinds)] for number in range(len(roles))]
    if fleet["fetch"] != "never":
        kinds = [kind | {"memory": "prefix"} for kind in kinds]
    schedulers = [server(**kind) for kind in kinds]
    jobs = load(fleet)
    names = ("staleness", "failures", "autoscale", "seed", "network", "on_receiver_death", "fetch")
    dispatcher, recorder = whole(
        schedulers,
        jobs,
        ROUTERS[fleet["router"]](),
        fleet["cost"],
        roles or (),
        token_bytes=1.0,
        layers=2,
        server={"overlap": fleet["overlap"]},
        **{name: fleet[name] for name in names},
    )
    sizes = jobs.rows
    requests = recorder.requests_table()
    assert requests["request"].to_pylist() == list(range(len(sizes)))
    finished = requests["state"].to_numpy() == "finished"
    if fleet["failures"] is None:
        assert finished.all()
    rejected = requests.filter(~finished)  # replicas died under these too often
    assert set(rejected["state"].to_pylist()) <= {"rejected"}
    assert all("fleet.max_retries" in reason for reason in rejected["reason"].to_pylist())
    assert (requests["output_tokens"].to_numpy() == [n for _, _, n in sizes])[finished].all()
    for before, after in pairwise(("arrival", "scheduled", "first_token", "finished")):
        early, late = (requests.filter(finished)[name].to_numpy() for name in (before, after))
        assert (early <= late).all()
    # With lazy advancement, replicas do not report departures to the dispatcher.
    assert dispatcher.lazy is not None or not dispatcher.num_requests
    assert not dispatcher.held
    assert dispatcher.migration is None or not dispatcher.migration.waiting
    for replica in dispatcher.replicas:
        assert not replica.incoming and not replica.notifier
        assert not replica.load.owed(inf)
        seen = dispatcher.view(replica)
        for name in COUNTS:
            assert not getattr(ReplicaView, name).fget(seen), name
    for scheduler in schedulers:
        scheduler.check()
        assert not scheduler.migration.held
        assert scheduler.memory.used == 0
        assert scheduler.memory.cpu_free == scheduler.memory.cpu_total
    for lane, there in zip(recorder.replicas, dispatcher.states.paid(), strict=True):
        table = lane.own_steps().table()
        starts, ends = table["start"].to_numpy(), table["end"].to_numpy()
        assert (starts <= ends).all()
        assert (starts[1:] >= ends[:-1]).all()
        assert all(  # a replica that is off runs no steps
            np.any([begin <= start and end <= over for begin, over in there])
            for start, end in zip(starts, ends, strict=True)
        )


@settings(max_examples=50)
@given(fleet=fleets)
def test_each_request_ends_once(fleet: dict[str, Any]) -> None:
    holds(fleet)


@settings(max_examples=50)
@given(fleet=full)
def test_each_request_ends_once_where_memory_runs_out(fleet: dict[str, Any]) -> None:
    holds(fleet)


@pytest.mark.slow
@settings(max_examples=1000)
@given(fleet=fleets | full)
def test_each_request_ends_once_in_many_fleets(fleet: dict[str, Any]) -> None:
    holds(fleet)


# -- servers alone ---------------------------------------------------------------------------------


scheduler = partial(server, blocks=24, max_seqs=8)
loads = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=40
)
KINDS: list[dict[str, Any]] = [
    {},
    {"policy": "priority", "preemption": "swap"},
    {"batching": "unified", "max_batched_tokens": 16},
    {"batching": "unified", "async_scheduling": True, "max_batched_tokens": 16},
    {"memory": "prefix", "batching": "unified"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("mode", ["open", "closed", "burst"])
def test_a_fleet_of_one_is_a_server(kind: dict[str, Any], mode: Mode) -> None:
    rows = [(0.02 * n, 3 + 5 * n % 17, 2 + 7 * n % 23) for n in range(60)]
    jobs = Jobs(rows, mode, users=5, think_time=0.03)
    alone, alone_steps = run(scheduler(**kind), jobs, Affine())
    fleet, steps = served([scheduler(**kind)], jobs, RoundRobin())
    assert fleet.equals(alone)
    assert steps.table().equals(alone_steps)


@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 4),
    jobs=loads,
)
def test_round_robin_is_as_many_servers_apart(
    kind: dict[str, Any], count: int, jobs: list[tuple[int, int, int]]
) -> None:
    all_rows = sorted((0.05 * at, prompt, output) for at, prompt, output in jobs)
    whole, steps = served(
        [scheduler(**kind) for _ in range(count)],
        Jobs(all_rows),
        RoundRobin(),
    )
    for index in range(count):
        mine = range(index, len(all_rows), count)
        if not mine:
            continue
        alone, alone_steps = run(
            scheduler(**kind),
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


@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 4),
    router=st.sampled_from(
        ["round_robin", "least_requests", "power_of_two", "least_tokens", "by batch"]
    ),
    staleness=st.sampled_from([0.0, 0.07]),
    jobs=loads,
)
def test_times_of_their_own_change_nothing(
    kind: dict[str, Any],
    count: int,
    router: str,
    staleness: float,
    jobs: list[tuple[int, int, int]],
) -> None:
    all_rows = sorted((0.05 * at, prompt, output) for at, prompt, output in jobs)

    def tables(together: bool) -> tuple[pa.Table, pa.Table]:
        requests, steps = served(
            [scheduler(**kind) for _ in range(count)],
            Jobs(all_rows),
            ByBatch() if router == "by batch" else make_router(router),
            staleness=staleness,
            together=together,
        )
        return requests, pa.Table.from_batches(steps.to_batches(), steps.schema)

    apart, together = tables(False), tables(True)
    assert apart[0].equals(together[0])
    assert apart[1].equals(together[1])
