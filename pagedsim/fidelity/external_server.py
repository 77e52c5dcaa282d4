"""The simulated server that stands for an outside one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.core.memory import PrefixMemory
from pagedsim.fidelity.external_log import Latencies, Log
from pagedsim.fidelity.external_requests import LogRequests, guesses
from pagedsim.run.backend import RunConfig, Settings
from pagedsim.run.simulated import Simulated
from pagedsim.run.simulation import Simulation
from pagedsim.sim.cost import CostModel
from pagedsim.sim.simulate import simulate


class ExternalServer:
    """A server with the outside one's settings."""

    def __init__(self, config: Settings, log: Log, first_step: float = 0.0) -> None:
        """`first_step`: seconds that its first answer takes at least, where it was cold."""
        backend = RunConfig(config).backend
        if not isinstance(backend, Simulated):
            raise ConfigError("backend=engine: must be sim: requests= are of a server elsewhere")
        self.config, self.log, self.backend = config, log, backend
        self.first_step = first_step

    @property
    def facts(self) -> Settings:
        """What this server is of all that its speed depends on."""
        replica = self._stage.replica
        return replica.more_than_shared | {
            "model": replica.model.name,
            "hardware": replica.hardware.name,
            "tensor_parallel": replica.tensor_parallel,
            "kv_cache_dtype": replica.kv_format,
            "quantization": replica.quantization or "none",
            "stack": str(self.config["stack"]["name"]),
            "batching": str(self.config["batching"]["_target_"]).rpartition(".")[2],
            "async_scheduling": bool(self.config["server"]["async_scheduling"]),
        }

    @property
    def scheduler(self) -> Scheduler:
        """One of such a server's, with nothing to do."""
        return self._stage.scheduler

    @property
    def guessed_blocks(self) -> int | None:
        """How many blocks it is taken to have, where the configuration does not say."""
        if self.config["memory"].get("blocks") is not None:
            return None
        return self.scheduler.memory.total

    @property
    def finds_prefixes(self) -> bool:
        """Whether its memory finds beginnings of prompts that it has computed before."""
        return isinstance(self.scheduler.memory, PrefixMemory)

    @property
    def cost(self) -> CostModel:
        """What `cost=` says before any fit."""
        return self._stage.cost

    @property
    def _stage(self) -> Simulation:
        return self.backend.simulation(RunConfig(self.config))

    def serve(
        self, cost: Settings | None = None, front: float | None = None, first: int | None = None
    ) -> Served:
        """Serve the log's requests.

        `cost`: settings in the place of the configuration's. `front`: seconds from when a request
        comes until the scheduler has it, in the place of what the cost model says. `first`: until
        so many of the earliest are answered.
        """
        config = self.config if cost is None else {**self.config, "cost": cost}
        backend = self.backend
        stage = backend.simulation(RunConfig(config))
        if front is None:
            front = stage.cost.server_seconds
        served = Served(self.log, first or len(self.log), front)
        with suppress(_Enough):
            simulate(
                stage.scheduler,
                LogRequests(self.log, self.finds_prefixes, guesses(config, self.log), front),
                _Cold(stage.cost, self.first_step - front),
                served,
                overlap=backend.overlap,
                fast_forward=backend.fast_forward,
            )
        return served


class _Cold:
    """A cost model whose first step takes `least` seconds at least."""

    def __init__(self, cost: CostModel, least: float) -> None:
        self.cost, self.least = cost, least
        self.by_totals = cost.by_totals
        self.decode_seconds, self.swap_seconds = cost.decode_seconds, cost.swap_seconds

    def step_seconds(self, plan: StepPlan) -> float:
        least, self.least = self.least, 0.0
        return max(self.cost.step_seconds(plan), least)


class _Enough(Exception):
    """All requests that are scored have finished."""


@dataclass
class Served:
    """A recorder of what the simulated server did."""

    log: Log
    wanted: int
    front: float = 0.0
    steps: int = 0
    preemptions: int = 0
    largest: dict[str, int] = field(default_factory=dict)
    """The largest steps: what one may know from this log."""
    ends: list[float] = field(default_factory=list)
    """Of every step, in seconds; `running`, `waiting` and `used` are what each had."""
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    """Blocks."""

    def __post_init__(self) -> None:
        self._first = np.full(len(self.log), np.nan)
        self._last, self._begun = self._first.copy(), self._first.copy()
        self._left = self.wanted
        self._plan: StepPlan | None = None

    @property
    def latencies(self) -> Latencies:
        """Of all requests; NaN for those that were not answered."""
        arrived, output = self.log.arrived, self.log.output
        waited = np.maximum(self._begun - arrived - self.front, 0.0)
        return Latencies(self._first - arrived, self._last - arrived, output, waited)

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        for rejection in plan.rejected:
            place = self.log.places[int(rejection.request.id)]
            raise ConfigError(f"{place} is refused by the simulated server: {rejection.reason}")
        self._plan = plan
        self.preemptions += len(plan.preemptions)
        self._count(plan, end, scheduler.memory.used)

    def again(self, end: float, used_blocks: int) -> None:
        assert self._plan is not None
        self._count(self._plan, end, used_blocks)

    def left(self, request: Request) -> None:
        row = int(request.id)
        assert request.first_token_at is not None and request.finished_at is not None
        assert request.scheduled_at is not None
        self._begun[row] = request.scheduled_at
        self._first[row], self._last[row] = request.first_token_at, request.finished_at
        self._left -= row < self.wanted
        if not self._left:
            raise _Enough

    def _count(self, plan: StepPlan, end: float, used: int) -> None:
        self.steps += 1
        self.ends.append(end)
        self.running.append(plan.running)
        self.waiting.append(plan.waiting)
        self.used.append(used)
        for name in _SIZES:
            if (size := getattr(plan, name)) > self.largest.get(name, 0):
                self.largest[name] = size


_SIZES = (
    "prefill_tokens",
    "prefill_attention",
    "prefill_context",
    "decode_count",
    "decode_context",
)
