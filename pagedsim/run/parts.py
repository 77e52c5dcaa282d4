"""The objects of one run, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from pagedsim.core import ConfigError, Scheduler
from pagedsim.fleet.spec import FleetSpec
from pagedsim.metrics.qoe import Reader
from pagedsim.metrics.slo import Slo, refuse_strangers, slo_of
from pagedsim.run.backend import Backend, Settings, Stage
from pagedsim.run.needs import refuse_unmet
from pagedsim.run.objects import make
from pagedsim.run.server import policy_of
from pagedsim.workload import Workload


@dataclass(frozen=True)
class Parts:
    """The objects of one run."""

    workload: Workload
    stage: Stage
    slo: Slo | None
    reader: Reader
    drawn: bool
    """Whether anything in the run depends on its seed."""

    @property
    def scheduler(self) -> Scheduler | None:
        """What plans the run's steps; None where nobody here sees it."""
        return self.stage.scheduler if self.stage.ours else None


def build(config: Settings, seed: int, workload: Workload | None = None) -> Parts:
    """The objects that a configuration describes; a `workload` that is there is not made anew."""
    slo = slo_of(config["slo"])
    reader = Reader(**config.get("qoe", {}))  # a configuration of before has none
    backend = backend_of(config)
    if not backend.fleets:
        refuse_fleet(config, "this backend is one server; backend=sim simulates many")
    stage = backend.stage(config, seed)
    # Last, since a long trace takes longest to read.
    workload = workload or backend.workload(config, seed)
    stage.refuse(workload)
    if not backend.elsewhere:
        refuse_unmet(policy_of(config["policy"]), workload)
    if slo is not None:
        refuse_strangers(slo, workload.clients)
    return Parts(workload, stage, slo, reader, workload.drawn or stage.drawn)


def refuse_fleet(config: Settings, why: str) -> None:
    """Raise ConfigError for several replicas where there must be one server."""
    settings = config.get("fleet")
    if settings and not make("fleet", settings, FleetSpec).alone:
        key = "pools" if settings.get("pools") else "replicas"
        raise ConfigError(f"fleet.{key}={settings[key]}: {why}")


def backend_of(config: Settings) -> Backend:
    """Where a configuration's requests are served."""
    return make("backend", config["backend"], Backend)
