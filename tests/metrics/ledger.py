"""A slow recording of a simulated run: what each step did, and what became of each request.

Every step is planned by itself and kept with the requests in it. `lives` reads them in the order of
time and notes which request got a token when, what it computed, and which of its blocks moved.
Nothing of `pagedsim.metrics` has a part in that but the hooks of a recorder.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pagedsim.backends.base import StoppableRecorder
from pagedsim.backends.sim import FleetRun, Simulated, Simulation
from pagedsim.core import Batching, Request, RequestId, Scheduler, State, StepPlan
from pagedsim.core.queues import Queues
from pagedsim.metrics.recorder import ReplicaRecorder
from pagedsim.run.job import Job, Outcome, run_job
from pagedsim.run.parts import Parts, build
from pagedsim.spec.objects import locate
from pagedsim.spec.run import RunSpec


@dataclass
class Step:
    """A step that was carried out to its end."""

    replica: int
    start: float
    end: float
    plan: StepPlan
    decodes: tuple[Request, ...]
    over: frozenset[Request]
    """Requests in it that had ended before their tokens came."""
    away: frozenset[Request]
    """Decodes in it that were detached by then: another replica computes them."""
    block_size: int
    on_cpu: int
    """Blocks there, once it was planned."""
    context: int = 0
    """Tokens that its decoding sequences attended to, in sum."""


class Departure(NamedTuple):
    """How a request left, or what it was at the end of the run."""

    request: Request
    replica: int
    state: str


CUT = ""
"""The session of requests of which not all were sent, which counts as none."""


@dataclass
class Life:
    """What became of one request."""

    id: RequestId
    client: str
    priority: float
    session: str | None
    arrival: float
    prompt: int
    width: int
    state: str
    left: float | None
    """When it ended, in whatever way."""
    replica: int
    source: int
    """The replica that handed it on last, as the fleet has it, or else that which it left."""
    tokens: list[float] = field(default_factory=list)
    """When each token of one of its sequences came."""
    scheduled: float | None = None
    attempt: Request | None = None
    attempts: int = 0
    preemptions: int = 0
    swapped: int = 0
    recomputed: int = 0
    cached: int = 0
    found: int = 0
    """Tokens that needed no computing, at all of its admissions."""
    prefilled: int = 0
    computed: set[int] = field(default_factory=set)
    """Positions of a sequence whose keys and values were ever computed for it."""

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def e2e(self) -> float:
        return self.tokens[-1] - self.arrival

    @property
    def generated(self) -> int:
        return len(self.tokens) * self.width

    @property
    def service(self) -> float:
        """1 for each token of a prompt whose first token came, 2 for each token generated."""
        return self.prompt * bool(self.tokens) + 2.0 * self.generated

    def begins(self, request: Request, now: float, cached: int) -> None:
        """It is scheduled for the first time, or anew."""
        self.attempt, self.scheduled, self.cached = request, now, cached
        self.attempts += 1
        self.tokens.clear()

    def begins_again(self) -> None:
        """Its last attempt came to nothing: what it cost remains, what it gave does not."""
        self.scheduled, self.cached = None, 0
        self.tokens.clear()

    def computes(self, start: int, tokens: int, sequences: int = 1) -> None:
        """Keys and values of these positions are computed, in so many sequences."""
        positions = range(start, start + tokens)
        self.recomputed += sequences * sum(position in self.computed for position in positions)
        self.computed.update(positions)


class Ledger(StoppableRecorder):
    """Records as ever, and keeps what it saw."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.seen: list[Step] = []
        self.departures: dict[RequestId, Departure] = {}
        self.hits: list[tuple[Request, float, int]] = []
        """Requests that were scheduled, when, and what was cached of each."""
        self.preemptions = Counter[RequestId]()
        self.swaps = Counter[RequestId]()
        """Blocks copied between GPU and CPU."""
        self.found = Counter[RequestId]()
        """Tokens that needed no computing, at all admissions of a request."""
        self._planned: dict[Request, int] = {}
        """Where what is planned of a request ends; of those that are not to be admitted anew."""
        self._left = stop_after
        LEDGERS.append(self)

    def add_replica(self) -> ReplicaRecorder:
        self.replicas.append(_ReplicaLedger(self, len(self.replicas)))
        return self.replicas[-1]

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        super().step(plan, start, end, scheduler)
        self.keep(0, plan, start, end, scheduler)

    def again(self, end: float, used_blocks: int) -> None:
        raise AssertionError("a step was skipped")

    def left(self, request: Request) -> None:
        super().left(request)
        self.note(request, 0 if not self.replicas else -1)

    def note(self, request: Request, replica: int) -> None:
        """A request left from a replica; -1: from none."""
        state = "unfinished" if request.alive else request.state.value
        self.departures[request.id] = Departure(request, replica, state)

    def keep(
        self, replica: int, plan: StepPlan, start: float, end: float, scheduler: Scheduler
    ) -> None:
        """Keep a step, before its end."""
        if self._left is not None:
            self._left -= 1
            if not self._left:
                self.stop()
        decodes = tuple(plan.decodes)
        over = frozenset(
            request
            for request in (*decodes, *(chunk.request for chunk in plan.chunks))
            if not request.alive
        )
        memory = scheduler.memory
        on_cpu = memory.cpu_total - plan.free_cpu_blocks
        away = frozenset(
            request
            for request in decodes
            if request in plan.gone and request.state is not State.WAITING
        )
        step = Step(replica, start, end, plan, decodes, over, away, memory.block_size, on_cpu)
        self.seen.append(step)

    def composed(self, plan: StepPlan) -> None:
        """What a plan decides, as soon as it is made: its step may be cut off."""
        self.hits += [(request, plan.now, cached) for request, cached in plan.hits]
        moved = Counter[RequestId]()
        for cause in plan.preemptions:
            if not cause.swapped:
                self._planned.pop(cause.request, None)
            self.preemptions[cause.request.id] += 1
            there = set(chain(*cause.request.cpu_tables))
            moved[cause.request.id] += sum(cpu in there for _, cpu in plan.swap_out)
        for chunk in plan.chunks:
            end = self._planned.pop(chunk.request, None)
            if end is None or (chunk.start < end and chunk.request.num_seqs == 1):
                self.found[chunk.request.id] += chunk.start
            if not chunk.samples:
                self._planned[chunk.request] = chunk.context
        for request in plan.resumed:
            there = set(chain(*request.tables))
            moved[request.id] += sum(block in there for _, block in plan.swap_in)
        assert moved.total() == len(plan.swap_out) + len(plan.swap_in)
        self.swaps.update(moved)

    def forget(self, replica: int) -> None:
        """Forget a replica's last step, which never ended."""
        last = max(i for i, step in enumerate(self.seen) if step.replica == replica)
        del self.seen[last]


class _ReplicaLedger(ReplicaRecorder):
    def __init__(self, whole: Ledger, index: int) -> None:
        super().__init__(whole, index)
        self.whole, self.index = whole, index

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        super().step(plan, start, end, scheduler)
        self.whole.keep(self.index, plan, start, end, scheduler)

    def again(self, end: float, used_blocks: int) -> None:
        raise AssertionError("a step was skipped")

    def undo(self) -> None:
        super().undo()
        self.whole.forget(self.index)

    def left(self, request: Request) -> None:
        super().left(request)
        self.whole.note(request, self.index)


class Watched(Simulated):
    """The backend `sim`; the recorder of a run knows the run."""

    def prepare(self, config: RunSpec) -> Simulation | FleetRun:
        RUNS.append(super().prepare(config))
        return RUNS[-1]


RUNS: list[Simulation | FleetRun] = []
LEDGERS: list[Ledger] = []
"""Those that were made."""


def _shown(settings: Any) -> Any:
    """The same settings, with batchings that show each plan as soon as it is made."""
    if not isinstance(settings, dict):
        return settings
    found = {key: _shown(value) for key, value in settings.items()}
    if "batching" in found:
        own = _showing(found["batching"]["_target_"])
        found["batching"] = {**found["batching"], "_target_": _path(own)}
    return found


def _showing(path: str) -> type[Batching]:
    """A subclass, which the module then has, too."""
    kind: Any = locate(path)

    def compose(self: Batching, queues: Queues, plan: StepPlan) -> None:
        kind.compose(self, queues, plan)
        LEDGERS[-1].composed(plan)

    name = f"Showing_{path.replace('.', '_')}"
    made: type[Batching] = type(name, (kind,), {"compose": compose, "__module__": __name__})
    globals()[name] = made
    return made


@dataclass(frozen=True)
class Recording:
    """A run that was watched, and what its configuration describes."""

    outcome: Outcome
    ledger: Ledger
    run: Simulation | FleetRun
    parts: Parts
    lives: list[Life]


def watch(
    config: dict[str, Any], folder: Path, seed: int = 0, stop_after: int | None = None
) -> Recording | Outcome:
    """Serve a configuration step by step; why there is no run, if it is refused."""
    backend = {"_target_": _path(Watched), "fast_forward": False}
    slow = {**_shown(config), "backend": {**config["backend"], **backend}}
    ledger = Ledger(stop_after)
    RUNS.clear()
    outcome = run_job(Job("watched", seed, slow, folder), ledger)
    if not ledger.departures:
        return outcome
    parts = build(config, seed)
    return Recording(outcome, ledger, RUNS[0], parts, lives(ledger, parts))


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def lives(ledger: Ledger, parts: Parts) -> list[Life]:
    """What became of each request, from the steps in the order in which they ended."""
    known = {name: _life(gone, parts) for name, gone in sorted(ledger.departures.items())}
    for step in sorted(ledger.seen, key=lambda step: step.end):
        plan = step.plan
        lost = {*plan.gone, *step.over}
        for request, cached in plan.hits:
            known[request.id].begins(request, plan.now, cached)
        for chunk in plan.chunks:
            life = known[chunk.request.id]
            life.prefilled += chunk.length
            life.computes(chunk.start, chunk.length)
            if chunk.samples and chunk.request not in lost:
                del life.tokens[chunk.context - life.prompt :]
                life.tokens.append(step.end)
        for request in step.decodes:
            life = known[request.id]
            length = life.prompt + len(life.tokens)
            if request not in step.away:
                life.computes(length - 1, 1, life.width)
            else:  # by the end of the step it may have been given more elsewhere
                length = life.prompt + sum(time <= step.start for time in life.tokens)
            step.context += length * life.width
            if request not in lost:
                life.tokens.append(step.end)
    for request, now, cached in ledger.hits:  # in a step that was cut off when the run was stopped
        life = known[request.id]
        if ledger.departures[request.id].request is request is not life.attempt:
            life.begins(request, now, cached)
    for life in known.values():
        life.preemptions, life.swapped = ledger.preemptions[life.id], ledger.swaps[life.id]
        life.found = ledger.found[life.id]
        if life.attempt is not ledger.departures[life.id].request:
            life.begins_again()
    if (turns := parts.workload.turns) is not None:
        cut = {turns.session[row] for row in range(len(turns)) if row not in known}
        for life in known.values():
            life.session = CUT if turns.session[int(life.id)] in cut else life.session
    columns = RUNS[0].request_columns(list(known))
    if "came_from" in columns:
        for life, source in zip(known.values(), columns["came_from"].to_pylist(), strict=True):
            life.source = life.replica if source is None else source
    return list(known.values())


def _life(gone: Departure, parts: Parts) -> Life:
    """A request as the workload has it; where answers decide when it comes, as it came."""
    request, workload = gone.request, parts.workload
    row = int(request.id)
    arrival = request.arrival
    if workload.mode != "closed" and workload.turns is None:
        arrival = 0.0 if workload.mode == "burst" else float(workload.arrival[row])
    assert arrival is not None
    return Life(
        id=row,
        client=workload.clients[workload.client[row]],
        priority=float(workload.priority[row]),
        session=request.session,
        arrival=arrival,
        prompt=int(workload.prompt_len[row]),
        width=workload.asked[workload.sampling[row]].num_seqs,
        state=gone.state,
        left=request.finished_at,
        replica=gone.replica,
        source=gone.replica,
    )
