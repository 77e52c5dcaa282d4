"""A recorded run again in the simulator, which must plan the same at every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from pagedsim.backends.engine import ENDS
from pagedsim.core import ConfigError, Continuation, Request, RequestId, Scheduler, StepPlan
from pagedsim.core.offload import IndexedTier, LowerTier
from pagedsim.core.source import Job
from pagedsim.engine.drive import Filler
from pagedsim.fidelity.engine_model import scheduler_of
from pagedsim.fidelity.recorded import Recorded
from pagedsim.metrics.files import REQUESTS, STEPS
from pagedsim.metrics.plans import described
from pagedsim.sim.copies import CopyTimes
from pagedsim.sim.simulate import simulate
from pagedsim.sim.transfers import Transfers
from pagedsim.spec.run import RunSpec
from pagedsim.workload import Workload


class Difference(NamedTuple):
    """The first step whose plans differ."""

    step: int
    engine: str
    simulator: str

    def text(self, steps: int, so: str = "") -> str:
        """The step's number among `steps`, the consequence `so`, and both plans."""
        return (
            f"step {self.step} of {steps} differs{so}\n"
            f"  engine:    {self.engine}\n  simulator: {self.simulator}"
        )


def replayed(run: Recorded) -> Difference | None:
    """Simulate a recorded run; returns the first step whose plan differs, or None."""
    for table, file, names in (
        (run.steps, STEPS, ("plan",)),
        (run.requests, REQUESTS, ("request", "output_ids")),
    ):
        for name in names:
            if name not in table.column_names:
                raise ConfigError(f"{run.folder / file}: has no column {name}")
    for what in ("steps", "copies"):
        if failed := run.machine.get(f"failed_{what}"):
            raise ConfigError(
                f"{run.folder}: {failed} of its {what} failed, which no simulator does"
            )
    try:
        return _first_difference(run)
    except ConfigError as error:
        raise ConfigError(f"{run.folder}: {error}") from error


def _first_difference(run: Recorded) -> Difference | None:
    witness = _Witness(run.steps["plan"].to_pylist())
    config = RunSpec(run.config, run.seed)
    workload = config.workload()
    if any(params.beam_search and params.num_seqs > 1 for params in workload.asked):
        raise ConfigError("beam searches cannot be replayed: which beams went on is not recorded")
    scheduler = scheduler_of(config, run.machine, _Retold, lambda *_: IndexedTier())
    scheduler.expect_tokens()
    ids, outputs = (run.requests[name].to_pylist() for name in ("request", "output_ids"))
    scheduler.outputs = dict(zip(ids, outputs, strict=True))
    source = _Filled(**vars(workload), fill=Filler(run.machine["vocab_size"], run.seed))
    settings: dict[str, Any] = {"fast_forward": False}
    if scheduler.offloads:
        connector = scheduler.queues.connector
        settings["transfers"] = _Ends(run, () if connector is None else connector.lower.tiers)
    try:
        simulate(scheduler, source, _Durations(run), witness, **settings)
        witness.end()
    except _Differs as differs:
        difference: Difference = differs.args[0]
        return difference
    return None


class _Differs(Exception):
    """Raised with the difference."""


class _Witness:
    """Compares each plan with the recorded one."""

    def __init__(self, plans: Sequence[str]) -> None:
        self._plans = plans
        self._at = 0

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        wanted = self._plans[self._at] if self._at < len(self._plans) else "(no such step)"
        if (simulated := described(plan, scheduler)) != wanted:
            raise _Differs(Difference(self._at, wanted, simulated))
        self._at += 1

    def end(self) -> None:
        """Nothing more comes."""
        if self._at < len(self._plans):
            raise _Differs(Difference(self._at, self._plans[self._at], "(no such step)"))

    def again(self, end: float, used_blocks: int) -> None:
        raise AssertionError("every step is planned by itself")

    def left(self, request: Request) -> None:
        """Nothing is kept of requests."""


class _Durations:
    """A cost model with the durations of the recorded steps, which include swaps."""

    by_totals = False

    def __init__(self, run: Recorded) -> None:
        steps = run.steps
        seconds = steps["end"].to_numpy() - steps["start"].to_numpy()
        self._seconds = dict(zip(steps["step"].to_pylist(), seconds.tolist(), strict=True))

    def step_seconds(self, plan: StepPlan) -> float:
        return self._seconds.get(plan.number, 0.0)  # the witness says what is wrong

    def decode_seconds(self, sequences: int, context: int) -> float:
        raise AssertionError("every step is planned by itself")

    def swap_seconds(self, blocks: int) -> float:
        return 0.0


class _Ends(Transfers):
    """Copies from and to a host tier that end when the engine saw it; recorded durations include
    what steps wait for."""

    def __init__(self, run: Recorded, tiers: Sequence[LowerTier]) -> None:
        super().__init__(CopyTimes(1.0, 1, 1.0))
        for name in ENDS.values():
            if name not in run.steps.column_names:
                raise ConfigError(f"{run.folder / STEPS}: has no column {name}")
        ends = (run.steps[name].to_pylist() for name in ENDS.values())
        self._with, self._after, self._with_below, self._after_below = ends
        self._tiers = [tier for tier in tiers if isinstance(tier, IndexedTier)]
        self._starts = run.steps["start"].to_pylist()
        self._step = -1  # the last that has ended
        self._at_end = False

    def begin(self, plan: StepPlan, now: float) -> float:
        return now

    def computed(self, plan: StepPlan, end: float) -> None:
        self._step += 1
        self._at_end = True

    def next_end(self, below: bool = False) -> float:
        following = self._step + 1
        if not 0 < following < len(self._starts):
            return inf
        waits = self._after[self._step] or self._after_below[self._step]
        return self._starts[following] if waits else inf

    def ended(self, now: float) -> list[int]:
        at_end, self._at_end = self._at_end, False
        if not 0 <= self._step < len(self._with):
            return []
        below = (self._with_below if at_end else self._after_below)[self._step]
        for tier in self._tiers:
            for job in below:
                tier.end(job)
        jobs: list[int] = (self._with if at_end else self._after)[self._step]
        if not at_end:  # each is told once
            self._after[self._step] = self._after_below[self._step] = []
        return jobs


@dataclass(frozen=True, eq=False, kw_only=True)
class _Filled(Workload):
    """A workload with the tokens that the engine filled in."""

    fill: Filler

    def requests(self) -> Iterator[Job]:
        return ((self.fill(request), length) for request, length in super().requests())


class _Retold(Scheduler):
    """A scheduler that receives the tokens that the engine sampled."""

    outputs: Mapping[Any, Sequence[int]] = {}

    def plan(self, now: float) -> StepPlan:
        plan, connector = super().plan(now), self.queues.connector
        if connector is not None and connector.promotes_for_ever:
            connector.protect_promoted()  # as the engine did
        return plan

    def commit(self, plan: StepPlan, now: float, *args: Any, **more: Any) -> list[Request]:
        return super().commit(plan, now, self._answers(plan))

    def complete(self, plan: StepPlan, now: float, *args: Any, **more: Any) -> list[Request]:
        return super().complete(plan, now, self._answers(plan))

    def _answers(self, plan: StepPlan) -> dict[RequestId, int | Continuation]:
        sampling = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]
        return {request.id: self._answer(request) for request in sampling if request.alive}

    def _answer(self, request: Request) -> int | Continuation:
        sampled = self.outputs.get(request.id) or ()
        if request.sampled_count >= len(sampled):
            raise ConfigError(
                f"{REQUESTS} has {len(sampled)} tokens in output_ids of request {request.id}, "
                "which was given more"
            )
        token = sampled[request.sampled_count]
        # Sequences that are sampled are recorded by their first; no plan depends on the others.
        return token if request.num_seqs == 1 else Continuation((token,) * request.num_seqs)
