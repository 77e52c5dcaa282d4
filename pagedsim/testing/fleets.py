"""Random fleets of the servers of a case, and what comes out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa

from pagedsim.cluster.autoscale import Autoscale
from pagedsim.cluster.link import Network
from pagedsim.cluster.replica import Unit
from pagedsim.cluster.simulate import simulate_fleet
from pagedsim.metrics.recorder import Recorder
from pagedsim.policies.routing.router import Router
from pagedsim.testing.cases import Case, Cost, Outcome, Requests

_APART = ("prefill", "decode", "both")
_COST: Any = Cost()


@dataclass(frozen=True)
class Fleet:
    """Replicas of a server, each with a role."""

    case: Case
    roles: Sequence[str]
    staleness: float

    @classmethod
    def drawn(cls, case: Case, seed: int) -> Fleet:
        """A random one."""
        draw = Random(f"fleet {seed}/{case.number}")
        roles = draw.choice((["both"] * draw.randint(1, 5), _APART, _APART + _APART))
        return cls(case, roles, draw.choice((0.0, 0.05)))

    def outcome(self, router: Router, autoscale: Autoscale | None = None) -> Outcome:
        """The tables of a run."""
        recorder = Recorder()
        units = [
            Unit(f"replica-{index}", role, self.case.scheduler(), _COST, token_bytes=1e4, layers=2)
            for index, role in enumerate(self.roles)
        ]
        recorders = [recorder.add_replica() for _ in units]
        source: Any = Requests(self.case)
        simulate_fleet(
            units,
            source,
            router,
            recorders,
            recorder,
            staleness=self.staleness,
            network=Network(0.1),
            autoscale=autoscale,
        )
        steps = pa.Table.from_batches(recorder.steps().to_batches())
        return steps, recorder.requests_table()

    def __str__(self) -> str:
        return f"{self.case}, replicas {', '.join(self.roles)}, staleness {self.staleness:g}"
