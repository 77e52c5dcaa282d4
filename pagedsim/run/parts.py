"""The objects of one run, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from pagedsim.metrics.slo import Slo
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


def build(config: Settings, seed: int, workload: Workload | None = None) -> Parts:
    """The objects that a configuration describes; a `workload` that is there is not made anew."""
    bounds = {name: bound for name, bound in config["slo"].items() if bound is not None}
    slo = Slo(**bounds) if bounds else None
    backend = backend_of(config)
    stage = backend.stage(config, seed)
    # Last, since a long trace takes longest to read.
    workload = workload or backend.workload(config, seed)
    refuse_unmet(policy_of(config["policy"]), workload)
    return Parts(workload, stage, slo)


def backend_of(config: Settings) -> Backend:
    """Where a configuration's requests are served."""
    return make("backend", config["backend"], Backend)
