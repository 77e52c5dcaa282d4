"""Random simulations, run in two ways that must give the same bytes.

A `Simulation` is plain data: its repr in a failure is all that is needed to run it again, with
`compare(Simulation(...))`. Hypothesis makes a failing one small before it is printed.

    python -m tests.fuzz --minutes 10          # new simulations until the time is up
    python -m tests.fuzz --digests 300 --kept CASES  # one line each, to compare two installations
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pagedsim.build import BATCHINGS, MEMORIES, ROUTERS, make_router
from pagedsim.cluster.link import Network
from pagedsim.cluster.prefix_fetch import FETCHES
from pagedsim.core import ConfigError, PagedsimError, Request, Scheduler, StepPlan
from pagedsim.core.source import Mode
from pagedsim.metrics.recorder import Recorder
from pagedsim.sglang import StoredHiCache
from pagedsim.sglang.hicache import USES_TO_WRITE
from pagedsim.sglang.storage import POLICIES
from pagedsim.sim.copies import CopyTimes
from pagedsim.sim.simulate import simulate
from pagedsim.sim.storage import StorageJobs
from pagedsim.sim.store import Link, Store, Way
from pagedsim.sim.transfers import Transfers
from pagedsim.workload import Sessions
from tests.cluster.fleets import whole
from tests.core.cases import Job, Server, hosts, jobs, servers
from tests.sim.harness import Affine, content

GAP = 0.0057
"""Seconds for which a job's `gap` counts: about half a step."""


@dataclass(frozen=True)
class Fleet:
    """What joins replicas; without roles each computes prompts and decodes."""

    router: str
    roles: tuple[str, ...]
    staleness: float = 0.0
    fetch: str = "never"
    bandwidth: float = 4e-8


@dataclass(frozen=True)
class Simulation:
    """Servers, and the requests that they receive; a single server without a `fleet`."""

    servers: tuple[Server, ...]
    jobs: tuple[Job, ...]
    ahead: bool = False
    mode: Mode = "open"
    users: int = 3
    sessions: bool = False
    """Whether a job waits for the job before it of the same session."""
    overlap: bool = False
    way: float = 0.0
    seed: int = 0
    fleet: Fleet | None = None

    def schedulers(self) -> list[Scheduler]:
        return [server.build(self.seed, self.ahead) for server in self.servers]


class Load:
    """The jobs of a simulation as its source of requests."""

    think_time = 0.004

    def __init__(self, case: Simulation) -> None:
        self.mode: Mode = case.mode
        self.users = case.users
        self._jobs = case.jobs
        self.turns = self._sessions() if case.sessions else None

    def _sessions(self) -> Sessions:
        last: dict[int, int] = {}
        turn: dict[int, int] = {}
        after, turns, keys = [], [], []
        for row, job in enumerate(self._jobs):
            key = job.priority % 3  # as `Job.request` names its session
            after.append([last[key]] if key in last else [])
            last[key], turn[key] = row, turn.get(key, 0) + 1
            turns.append(turn[key])
            keys.append(key)
        pauses = [GAP * job.gap for job in self._jobs]
        return Sessions(keys, turns, after, pauses)

    def requests(self) -> Iterator[tuple[Request, int]]:
        times = accumulate(GAP * job.gap for job in self._jobs)
        for row, (job, at) in enumerate(zip(self._jobs, times, strict=True)):
            request = job.request("")
            request._id = row
            request._arrival = at
            if request.deadline is not None:
                request._deadline = at + request.deadline * GAP
            yield request, job.output


class Prices(Affine):
    """Costs that also look at each plan, or do not."""

    def __init__(self, schedulers: Sequence[Scheduler], lasting: bool) -> None:
        super().__init__(block=3e-4)
        self.schedulers = schedulers
        self.lasting = lasting

    def step_seconds(self, plan: StepPlan) -> float:
        for scheduler in self.schedulers:  # a server, which looks at none, has turned it off
            scheduler.lasting_plans = self.lasting
        return super().step_seconds(plan)


class Watcher(Recorder):
    """Remembers which requests decoded in each step, to ask the plan again when all is over."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[tuple[StepPlan, tuple[Request, ...]]] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        super().step(plan, start, end, scheduler)
        self.plans.append((plan, tuple(plan.decodes)))


def outcome(
    case: Simulation, *, step_by_step: bool = False, recorder: Recorder | None = None
) -> list[object]:
    """The tables of a simulation, or the error that ends it.

    `step_by_step`: every step is planned by itself, and plans last.
    """
    how: dict[str, Any] = {"fast_forward": not step_by_step, "overlap": case.overlap}
    if recorder is None:
        recorder = Watcher() if step_by_step else Recorder()
    try:
        schedulers = case.schedulers()
        costs = Prices(schedulers, step_by_step)
        if case.fleet is None:
            (one,) = schedulers
            how |= _offloading(one, _store())
            simulate(one, Load(case), costs, recorder, way=case.way, **how)
            tables = [recorder.requests_table(), recorder.steps_table()]
        else:
            store = _store()
            _, seen = whole(
                schedulers,
                Load(case),
                make_router(case.fleet.router),
                costs,
                case.fleet.roles,
                token_bytes=1.0,
                server=[how | _offloading(scheduler, store) for scheduler in schedulers],
                together=any(one.memory.lower_tiers for one in schedulers),
                network=Network(case.fleet.bandwidth),
                fetch=case.fleet.fetch,
                staleness=case.fleet.staleness,
                way=case.way,
                seed=case.seed,
                recorder=None if isinstance(recorder, Watcher) else recorder,
            )
            tables = [seen.requests_table(), seen.steps_table()]
    except PagedsimError as error:
        return [type(error).__name__, str(error)]
    if isinstance(recorder, Watcher):
        for plan, decodes in recorder.plans:
            assert tuple(plan.decodes) == decodes, "a plan of which decodes changed afterwards"
    return [content(table) for table in tables]


def _offloading(scheduler: Scheduler, store: Store) -> dict[str, Any]:
    """What a server needs for its host tier, and for what is below."""
    needs: dict[str, Any] = {}
    if scheduler.offloads:
        connector = scheduler.queues.connector
        below: Any = connector.lower.tiers if connector is not None else ()
        needs["transfers"] = Transfers(CopyTimes(7e5, 1, bus=1e8), below=below)
    if isinstance(scheduler.memory, StoredHiCache):
        needs["storage"] = StorageJobs(store, scheduler.memory)
    return needs


def _store() -> Store:
    """A storage in which a page takes about a millisecond."""
    return Store(Link(Way(1e-3, 3e3), Way(1e-3, 2e3)), 1.0, 300)


def compare(case: Simulation) -> bool:
    """Fail where skipping steps changes a byte; whether the combination is not refused."""
    fast = outcome(case)
    if fast[0] == ConfigError.__name__:
        return False
    assert fast == outcome(case, step_by_step=True), case
    return True


# -- strategies ------------------------------------------------------------------------------------


@cache
@st.composite
def simulations(draw: st.DrawFn, fleets: bool | None = None) -> Simulation:
    """Single servers, fleets, or (None) both."""
    fleet = None
    if draw(st.booleans()) if fleets is None else fleets:
        fleet = draw(_fleets())
    ahead, apart = draw(st.booleans()), fleet is not None and "prefill" in fleet.roles
    made = []
    for _ in fleet.roles if fleet else (0,):
        memories = tuple(MEMORIES)
        if fleet is not None:
            fetches = fleet.fetch != "never"
            memories = (
                ("prefix", *(() if apart else ("radix",))) if fetches else ("paged", "prefix")
            )
        batching = draw(st.sampled_from(tuple(BATCHINGS)))
        server = draw(servers(batching, draw(st.sampled_from(memories))))
        if draw(st.booleans()):  # room for more requests than a queue of length zero has
            limits = (server.max_model_len, server.max_batched_tokens)
            more = [limit and 3 * limit for limit in limits]
            server = replace(
                server,
                blocks=3 * server.blocks,
                reserved_len=3 * server.reserved_len,
                max_model_len=more[0],
                max_batched_tokens=more[1],
            )
        can_load = server.batching == "unified" and server.memory in ("paged", "prefix")
        if can_load and not apart and draw(st.booleans()):
            host = draw(hosts())
            server = replace(server, preemption="recompute", cpu_blocks=0, host=host)
        if server.batching == "sglang" and server.memory == "radix":
            write = draw(st.sampled_from([None, *USES_TO_WRITE]))
            blocks = draw(st.integers(1, 3 * server.blocks))
            policy = draw(st.sampled_from([None, *POLICIES]))
            hicache = None if write is None else (blocks, write, policy)
            server = replace(server, hicache=hicache)
        made.append(server)
    longest = min(s.max_model_len or s.reserved_len or s.blocks * s.block_size for s in made)
    widths = (1,) if fleet else draw(st.sampled_from([(1,), (1,), (1, 1, 1, 2, 3)]))
    each = jobs(min(1 + longest // 2, 40), min(24, 2 + longest // 2), widths)
    most = draw(st.sampled_from([4, 16, 40, 60]))
    return Simulation(
        servers=tuple(made),
        jobs=tuple(draw(st.lists(each, min_size=most // 2, max_size=most))),
        ahead=ahead,
        mode=draw(st.sampled_from(["open", "open", "closed", "burst"])),
        users=draw(st.integers(1, 9)),
        sessions=draw(st.sampled_from([False, False, True])),
        overlap=draw(st.booleans()),
        way=draw(st.sampled_from([0.0, 0.0, 0.013])),
        seed=draw(st.integers(0, 99)),
        fleet=fleet,
    )


@st.composite
def _fleets(draw: st.DrawFn) -> Fleet:
    count = draw(st.integers(1, 3))
    apart = draw(st.booleans())
    roles = ["prefill", "decode"] if apart else ["both"] * count
    if apart:
        roles += draw(st.lists(st.sampled_from(["prefill", "decode", "both"]), max_size=2))
    return Fleet(
        router=draw(st.sampled_from(tuple(ROUTERS))),
        roles=tuple(roles),
        staleness=draw(st.sampled_from([0.0, 0.0, 0.02])),
        fetch=draw(st.sampled_from(FETCHES)),
        bandwidth=draw(st.sampled_from([4e-8, 1e-5])),
    )


# -- from the command line -------------------------------------------------------------------------

QUIET = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


def draw(count: int, first: int, look: Callable[[Simulation], None]) -> None:
    """Show `look` so many simulations, the same for the same `first` seed."""
    random = settings(QUIET, max_examples=count, phases=[Phase.generate])
    seed(first)(random(given(simulations())(look)))()


def search(minutes: float, first: int, fleets: bool | None = None) -> Simulation | None:
    """Compare new simulations until the time is up; the smallest found that differs, if any."""
    until, number = time.monotonic() + 60 * minutes, first
    done, differs = [0, 0], []

    def counted(case: Simulation) -> None:
        try:
            done[compare(case)] += 1
        except AssertionError:
            differs.append(case)
            raise

    while time.monotonic() < until:
        run = settings(QUIET, max_examples=250)(given(simulations(fleets))(counted))
        try:
            seed(number)(run)()
        except AssertionError:
            print(f"\nseed {number}: the smallest simulation found that differs is\n{differs[-1]}")
            return differs[-1]
        print(f"\rseed {number}: {done[1]} alike, {done[0]} refused", end="", flush=True)
        number += 1
    print()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to search")
    parser.add_argument("--seed", type=int, default=0, help="of the first simulations")
    parser.add_argument("--fleets", action=argparse.BooleanOptionalAction, help="only, or none")
    parser.add_argument("--digests", type=int, help="print digests of so many simulations")
    parser.add_argument("--kept", type=Path, help="a file of them, which the first command makes")
    words = parser.parse_args()
    if not words.digests:
        return search(words.minutes, words.seed, words.fleets) is not None
    for case in drawn(words.digests, words.seed, words.kept):
        print(sha256(repr(outcome(case)).encode()).hexdigest()[:16], case)
    return 0


def drawn(count: int, first: int, kept: Path | None) -> list[Simulation]:
    """Simulations that were kept in a file, else so many, which are kept there.

    What Hypothesis draws depends on constants in the sources around it: two installations do not
    draw the same.
    """
    if kept is not None and kept.exists():
        cases: list[Simulation] = pickle.loads(kept.read_bytes())
        return cases
    cases = []
    draw(count, first, lambda case: cases.append(case))
    if kept is not None:
        kept.write_bytes(pickle.dumps(cases))
    return cases


if __name__ == "__main__":
    sys.exit(main())
