"""GPU power by the work of a step: an energy roofline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.sim.cost.work import Work, works
from pagedsim.sim.replica import Replica

if TYPE_CHECKING:
    from pagedsim.metrics.steps import Batches


@dataclass(frozen=True)
class EnergyRoofline:
    """A busy GPU draws a base power plus a term per FLOP and a term per byte of memory traffic.

    All are fractions of its TDP, which is also the maximum: `busy` is the base power, `compute` is
    added at the peak FLOP rate, `bandwidth` at the peak memory bandwidth, and `idle` is the power
    between steps. The form is that of Choi, Bedard, Fowler and Vuduc (A Roofline Model of Energy,
    IPDPS 2013); `conf/backend/sim.yaml` has the sources of the numbers.
    """

    idle: float
    busy: float
    compute: float
    bandwidth: float

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            share = key in ("idle", "busy")
            require_number(f"power.{key}", value, 0, 1 if share else None)
        if self.busy < self.idle:
            raise ConfigError(
                f"power.busy={self.busy:g}: must be at least power.idle={self.idle:g}"
            )

    def share(self, mfu: float, mbu: float) -> float:
        """The fraction of its TDP that a GPU draws in a step.

        >>> EnergyRoofline(idle=0.1, busy=0.3, compute=1.0, bandwidth=0.5).share(mfu=0.1, mbu=0.8)
        0.8
        """
        return min(1.0, self.busy + self.compute * mfu + self.bandwidth * mbu)

    def watts(self, replica: Replica, work: Work, seconds: float) -> float | None:
        """Power of all GPUs in a step; None if the TDP is unknown."""
        hardware = replica.hardware
        if hardware.tdp_w is None:
            return None
        share = self.share(work.mfu(seconds, hardware), work.mbu(seconds, hardware))
        return share * hardware.tdp_w * replica.gpus

    def idle_watts(self, replica: Replica) -> float | None:
        """Power of all GPUs between steps; None if the TDP is unknown."""
        tdp = replica.hardware.tdp_w
        return None if tdp is None else self.idle * tdp * replica.gpus

    def joules(self, replica: Replica, steps: Batches) -> float | None:
        """Energy of all GPUs in the recorded steps, empty ones as idle; None if the TDP is
        unknown."""
        hardware, at_tdp = replica.hardware, 0.0
        if hardware.tdp_w is None:
            return None
        for part in steps.to_batches():
            flop, read = works(replica, part)
            seconds = part["end"].to_numpy() - part["start"].to_numpy()
            drawn = self.compute / hardware.flop_rate * flop
            drawn += self.bandwidth / hardware.bandwidth * read
            drawn += self.busy * seconds
            working = np.minimum(drawn, seconds)
            at_tdp += float(np.where(flop > 0, working, self.idle * seconds).sum())
        return at_tdp * hardware.tdp_w * replica.gpus
