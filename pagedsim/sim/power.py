"""Watts of a GPU by what a step does: a roofline of energy."""

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
    """A GPU at work draws `busy`, so much for each FLOP, and so much for each byte from memory.

    All are shares of its TDP, which it never exceeds: `compute` is what FLOP add at their peak
    rate, `bandwidth` what bytes add at theirs, and `idle` what it draws between steps. The form is
    that of Choi, Bedard, Fowler and Vuduc (A Roofline Model of Energy, IPDPS 2013);
    `conf/backend/sim.yaml` says where the numbers come from.
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
        """The part of its TDP that a GPU draws in a step.

        >>> EnergyRoofline(idle=0.1, busy=0.3, compute=1.0, bandwidth=0.5).share(mfu=0.1, mbu=0.8)
        0.8
        """
        return min(1.0, self.busy + self.compute * mfu + self.bandwidth * mbu)

    def watts(self, replica: Replica, work: Work, seconds: float) -> float | None:
        """Of all GPUs in a step; None where no TDP is known."""
        hardware = replica.hardware
        if hardware.tdp_w is None:
            return None
        share = self.share(work.mfu(seconds, hardware), work.mbu(seconds, hardware))
        return share * hardware.tdp_w * replica.gpus

    def idle_watts(self, replica: Replica) -> float | None:
        """Of all GPUs between steps, likewise."""
        tdp = replica.hardware.tdp_w
        return None if tdp is None else self.idle * tdp * replica.gpus

    def joules(self, replica: Replica, steps: Batches) -> float | None:
        """Of all GPUs in the recorded steps, likewise; one that computes nothing is idle."""
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
