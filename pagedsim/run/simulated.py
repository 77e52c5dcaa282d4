"""The backend `sim`: simulated time, by a SimPy process and a cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.core.errors import require_flag, require_number, shown, unknown
from pagedsim.fleet.spec import Pool
from pagedsim.run.backend import Backend, RunConfig, Settings
from pagedsim.run.simulation import FleetRun, Place, Simulation
from pagedsim.server import ServerSpec
from pagedsim.sim.beams import TURNOVER, Beams
from pagedsim.sim.cost import CostModel, Decodes
from pagedsim.sim.cost.base import refuse_attributes
from pagedsim.sim.power import EnergyRoofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.sizing import sized
from pagedsim.sim.tiering import tiered
from pagedsim.sim.tiers import Tiers
from pagedsim.workload import Workload

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Simulated(Backend):
    """Where steps are simulated."""

    fleets = True

    overlap: bool = False
    """Whether swaps out go on beside the computation."""
    fast_forward: bool = True
    """Whether quiet decode steps are planned in one go."""
    beam_turnover: float = TURNOVER
    """How often a beam is replaced by another's child; see `Beams`."""
    copy_efficiency: float | None = 0.9
    """The part of the GPU's bandwidth that copies of its blocks reach; None: they take no time."""
    power: EnergyRoofline | None = None
    """What GPUs draw; None: energy is not reported."""
    only: str | None = None
    """The one of `PHASES` that is done here, as if another server did the other; None: both."""

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
        if self.only is not None and str(self.only) not in PHASES:
            raise unknown("only", str(self.only), PHASES)

    def traffic(self, settings: Settings, seed: int) -> Workload:
        whole = super().traffic(settings, seed)
        if self.only != "prefill":
            return whole
        told = "backend.only=prefill: every answer ends with its first token"
        ones = np.ones_like(whole.output_len)
        return replace(whole, output_len=ones, notices=(*whole.notices, told))

    def prepare(self, config: RunConfig) -> Simulation | FleetRun:
        if config.fleet.alone:
            return self.simulation(config)
        places = [
            place
            for name, pool in config.fleet.kinds.items()
            for place in self._places(name, pool, config)
        ]
        return FleetRun(config.fleet, places, config.router, config.seed)

    def simulation(self, config: RunConfig) -> Simulation:
        """One server."""
        server = config.server
        with config.errors_of("memory"):
            replica = Replica.of(server, config.model, config.hardware)
        cost = config.cost(replica)
        refuse_attributes(cost)
        if self.only == "decode":
            cost = Decodes(cost)
        with config.errors_of("server", "memory"):
            server, tiers = tiered(server.priced(cost.prices()), replica, cost)
            reserved = config.settings["memory"].get("reserved_gib", 0.5)
            return self._simulation(replica, cost, sized(server, replica, reserved), config, tiers)

    def _simulation(
        self,
        replica: Replica,
        cost: CostModel,
        server: ServerSpec,
        config: RunConfig,
        tiers: Tiers | None,
    ) -> Simulation:
        copy_seconds = 0.0
        if self.copy_efficiency is not None:  # a block is read, and written elsewhere on the GPU
            bandwidth = replica.hardware.bandwidth * self.copy_efficiency
            copy_seconds = 2 * replica.block_bytes / bandwidth
        return Simulation(
            replica,
            cost,
            server,
            Beams(self.beam_turnover, config.seed),
            tiers,
            fast_forward=self.fast_forward,
            overlap=self.overlap,
            copy_seconds=copy_seconds,
            power=self.power,
            decodes_only=self.only == "decode",
        )

    def _places(self, name: str, pool: Pool, config: RunConfig) -> Iterator[Place]:
        """The replicas of a pool; what fits and what a step takes is worked out once for all."""
        try:
            first = self.simulation(config.pool(name))
        except PagedsimError as error:
            raise ConfigError(f"fleet.pools.{name}: {error}" if name else str(error)) from error
        for index in range(pool.replicas):
            simulation = self._like(first, config.pool(name)) if index else first
            yield Place(f"{name or 'replica'}-{index}", name, pool.role, simulation)

    def _like(self, one: Simulation, config: RunConfig) -> Simulation:
        """Another such server, with a policy and a memory of its own."""
        server = config.server.priced(one.cost.prices())
        server, tiers = tiered(server, one.replica, one.cost, one.tiers)
        server = server.of_sizes(one.server.sizes())
        return self._simulation(one.replica, one.cost, server, config, tiers)
