"""Small fleets with costs that one can compute by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa

from pagedsim.core import Scheduler
from pagedsim.core.source import Source
from pagedsim.fleet.member import Unit
from pagedsim.fleet.simulate import simulate_fleet
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.cost import CostModel
from policies.routing.router import Router
from tests.sim.harness import Affine, Constant


def served(
    schedulers: Sequence[Scheduler],
    source: Source,
    router: Router,
    cost: Constant | None = None,
    roles: Sequence[str] = (),
    token_bytes: float = 0.0,
    layers: int = 1,
    **settings: Any,
) -> tuple[pa.Table, Any]:
    """The tables of requests and steps of a fleet."""
    whole = Recorder()
    costs = cost or Affine()
    units = [
        Unit(
            f"replica-{index}",
            roles[index] if roles else "both",
            one,
            cast(CostModel, costs),
            token_bytes=token_bytes,
            layers=layers,
        )
        for index, one in enumerate(schedulers)
    ]
    lanes = [whole.lane() for _ in units]
    simulate_fleet(units, source, router, lanes, whole, **settings)
    return whole.requests_table(), whole.steps()
