"""The backend `sim`: simulated time, by a SimPy process and a cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.core.errors import require_flag, require_number, shown, unknown
from pagedsim.fleet.spec import FleetSpec, Pool
from pagedsim.run.backend import Backend, Settings
from pagedsim.run.objects import make, said_of, seeded
from pagedsim.run.parts import server_of
from pagedsim.run.pools import configured, without_configurations
from pagedsim.run.simulation import FleetStage, Place, Simulation
from pagedsim.sim.beams import TURNOVER, Beams
from pagedsim.sim.cost import CostModel, Decodes
from pagedsim.sim.cost.base import refuse_attributes
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.power import EnergyRoofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.sizing import sized
from pagedsim.sim.tiering import tiered
from pagedsim.workload import Workload
from policies.routing.router import Router

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
    """What GPUs draw; None: no energy is told."""
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

    def stage(self, config: Settings, seed: int) -> Simulation | FleetStage:
        settings = config.get("fleet")  # a configuration of before has none
        spec = (
            FleetSpec()
            if settings is None
            else make("fleet", without_configurations(settings), FleetSpec)
        )
        if spec.alone:
            return self.simulation(config, seed)
        places = [
            place
            for name, pool in spec.kinds.items()
            for place in self._places(name, pool, config, seed)
        ]
        router = make("router", seeded("router", config["router"], seed), Router)
        return FleetStage(spec, places, router, seed)

    def simulation(self, config: Settings, seed: int) -> Simulation:
        """One server."""
        server, memory = server_of(config, seed), config["memory"]
        model = make("model", config["model"], ModelShape)
        hardware = make("hardware", config["hardware"], Hardware)
        with said_of("memory", memory):
            replica = Replica.of(server, model, hardware)
        cost = make("cost", config["cost"], CostModel, replica=replica)
        refuse_attributes(cost)
        if self.only == "decode":
            cost = Decodes(cost)
        with said_of("server", config["server"]), said_of("memory", memory):
            server, tiers = tiered(server.priced(cost.prices()), replica, cost)
            server = sized(server, replica, memory.get("reserved_gib", 0.5))
            beams = Beams(self.beam_turnover, seed)
            return Simulation(self, replica, cost, server, beams, tiers)

    def _like(self, one: Simulation, config: Settings, seed: int) -> Simulation:
        """Another such server, with a policy and a memory of its own."""
        server = server_of(config, seed).priced(one.cost.prices())
        server, tiers = tiered(server, one.replica, one.cost, one.tiers)
        server = server.of_sizes(one.server.sizes())
        beams = Beams(self.beam_turnover, seed)
        return Simulation(self, one.replica, one.cost, server, beams, tiers)

    def _places(self, name: str, pool: Pool, config: Settings, seed: int) -> Iterator[Place]:
        """The replicas of a pool; what fits and what a step takes is worked out once for all."""
        own = configured(config, name)
        try:
            first = self.simulation(own, seed)
        except PagedsimError as error:
            raise ConfigError(f"fleet.pools.{name}: {error}" if name else str(error)) from error
        for index in range(pool.replicas):
            simulation = self._like(first, own, seed) if index else first
            yield Place(f"{name or 'replica'}-{index}", name, pool.role, simulation)
