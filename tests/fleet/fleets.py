"""Small fleets with costs that one can compute by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from pagedsim.core import Scheduler
from pagedsim.core.source import Source
from pagedsim.fleet.member import Unit
from pagedsim.fleet.simulate import simulate_fleet
from pagedsim.metrics.recorder import Recorder
from policies.routing.router import Router
from tests.sim.harness import Affine, Constant


def served(
    schedulers: Sequence[Scheduler],
    source: Source,
    router: Router,
    cost: Constant | None = None,
    roles: Sequence[str] = (),
    recorder: Callable[[], Recorder] = Recorder,
    **settings: Any,
) -> tuple[pa.Table, Any]:
    """The tables of requests and steps of a fleet."""
    whole = recorder()
    costs = cost or Affine()
    units = [
        Unit(f"replica-{index}", roles[index] if roles else "both", one, costs)  # type: ignore[arg-type]
        for index, one in enumerate(schedulers)
    ]
    lanes = [whole.lane() for _ in units]
    simulate_fleet(units, source, router, lanes, whole, **settings)
    return whole.requests_table(), whole.steps()
