"""The backend `sim`: simulated time, by a SimPy process and a cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from pagedsim.core import ConfigError, Scheduler
from pagedsim.core.errors import require_flag, require_number, shown
from pagedsim.run.backend import Backend, Settings, Stage
from pagedsim.run.objects import make, said_of
from pagedsim.run.server import server_of
from pagedsim.run.stoppable import StoppableRecorder
from pagedsim.sim.beams import TURNOVER, Beams
from pagedsim.sim.cost import CostModel
from pagedsim.sim.cost.work import total_work
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.power import EnergyRoofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.sim.sizing import sized
from pagedsim.workload import Workload


@dataclass(frozen=True)
class Simulated(Backend):
    """Where steps are simulated."""

    overlap: bool = False
    """Whether swaps out go on beside the computation."""
    fast_forward: bool = True
    """Whether quiet decode steps are planned in one go."""
    beam_turnover: float = TURNOVER
    """How often a beam is replaced by another's child; see `Beams`."""
    copy_efficiency: float | None = 0.9
    """The part of the GPU's bandwidth that copies of its blocks reach; None: they take no time."""
    power: EnergyRoofline | None = None
    """What GPUs draw; None: no energy is told."""

    def __post_init__(self) -> None:
        for key in ("overlap", "fast_forward"):
            require_flag(key, getattr(self, key))
        require_number("beam_turnover", self.beam_turnover, 0, 1)
        if self.copy_efficiency is not None:
            require_number("copy_efficiency", self.copy_efficiency, above=0, high=1)
        if not isinstance(self.power, EnergyRoofline | None):
            raise ConfigError(
                f"power={shown(self.power)}: must be settings with a _target_, or null"
            )

    def stage(self, config: Settings, seed: int) -> Simulation:
        server, memory = server_of(config), config["memory"]
        model = make("model", config["model"], ModelShape)
        hardware = make("hardware", config["hardware"], Hardware)
        with said_of("memory", memory):
            replica = Replica.of(server, model, hardware)
        cost = make("cost", config["cost"], CostModel, replica=replica)
        with said_of("server", config["server"]), said_of("memory", memory):
            server = server.priced(cost.prices())
            scheduler = sized(server, replica, memory.get("reserved_gib", 0.5)).scheduler()
        return Simulation(self, replica, cost, scheduler, Beams(self.beam_turnover, seed))


class Simulation(Stage):
    """One replica in simulated time."""

    def __init__(
        self,
        backend: Simulated,
        replica: Replica,
        cost: CostModel,
        scheduler: Scheduler,
        beams: Beams,
    ) -> None:
        self.backend = backend
        self.replica = replica
        self.cost = cost
        self.scheduler = scheduler
        self.beams = beams

    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        simulate(
            self.scheduler,
            workload,
            self.cost,
            recorder,
            fast_forward=self.backend.fast_forward,
            way=self.cost.server_seconds,
            **self.settings,
        )

    @property
    def settings(self) -> Settings:
        """What a `Server` takes beside its scheduler and its costs."""
        return {
            "overlap": self.backend.overlap,
            "copy_seconds": self._copy_seconds,
            "beams": self.beams,
        }

    @property
    def _copy_seconds(self) -> float:
        """Reading a block and writing it elsewhere on the GPU."""
        if self.backend.copy_efficiency is None:
            return 0.0
        bandwidth = self.replica.hardware.bandwidth * self.backend.copy_efficiency
        return 2 * self.replica.block_bytes / bandwidth

    def work(self, steps: pa.Table) -> Mapping[str, float | None]:
        done, hardware = total_work(self.replica, steps), self.replica.hardware
        known: dict[str, float | None] = {
            "flops": done.flop,
            "bytes": done.bytes,
            "peak_flops": hardware.flop_rate,
            "peak_bandwidth": hardware.bandwidth,
            "euros_per_hour": self.replica.euros_per_hour,
        }
        if (power := self.backend.power) is not None:
            known["joules"] = power.joules(self.replica, steps)
            known["idle_watts"] = power.idle_watts(self.replica)
        return known

    def notices(self) -> list[str]:
        return self.cost.notices
