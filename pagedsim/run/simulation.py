"""One replica in simulated time, as a backend's stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pagedsim.core import policy_validation
from pagedsim.metrics.steps import Batches
from pagedsim.run.backend import Settings, Stage
from pagedsim.run.objects import draws
from pagedsim.run.stoppable import StoppableRecorder
from pagedsim.server import ServerSpec
from pagedsim.sim.beams import Beams
from pagedsim.sim.cost import CostModel
from pagedsim.sim.cost.work import total_work
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.sim.tiers import Tiers
from pagedsim.workload import Workload

if TYPE_CHECKING:
    from pagedsim.run.simulated import Simulated


class Simulation(Stage):
    """One replica in simulated time."""

    def __init__(
        self,
        backend: Simulated,
        replica: Replica,
        cost: CostModel,
        server: ServerSpec,
        beams: Beams,
        tiers: Tiers | None = None,
    ) -> None:
        """`server` has all its sizes, and `tiers` what its memory may have below the GPU."""
        self.backend = backend
        self.replica = replica
        self.cost = cost
        self.server = server
        self.scheduler = server.scheduler()
        self.beams = beams
        self.tiers = tiers

    @property
    def drawn(self) -> bool:
        return draws(self.scheduler.policy)

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
            "tiers": self.tiers,
        }

    @property
    def _copy_seconds(self) -> float:
        """Reading a block and writing it elsewhere on the GPU."""
        if self.backend.copy_efficiency is None:
            return 0.0
        bandwidth = self.replica.hardware.bandwidth * self.backend.copy_efficiency
        return 2 * self.replica.block_bytes / bandwidth

    def work(self, steps: Batches) -> Mapping[str, float | None]:
        done, hardware = total_work(self.replica, steps), self.replica.hardware
        known: dict[str, float | None] = {
            "flops": done.flop,
            "bytes": done.bytes,
            "peak_flops": hardware.flop_rate,
            "peak_bandwidth": hardware.bandwidth,
            "euros_per_hour": self.replica.euros_per_hour,
        }
        if self.backend.only == "decode":  # steps have prompts that were computed elsewhere
            return known | {"flops": None, "bytes": None}
        if (power := self.backend.power) is not None:
            known["joules"] = power.joules(self.replica, steps)
            known["idle_watts"] = power.idle_watts(self.replica)
        return known

    def notices(self) -> list[str]:
        return policy_validation.lines(self.cost, "notices", self.cost.notices)
