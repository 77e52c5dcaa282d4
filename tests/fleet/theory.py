"""What tests of queueing theory share: seeds, intervals, and service of a drawn length.

Times are in units of the mean service.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Scheduler, StepPlan
from tests.sim.harness import Constant

SEEDS = range(12)
T_999 = 4.437
"""Student's t for 11 degrees of freedom, both sides, 99.9 %."""

Floats = NDArray[np.float64]


@dataclass
class Drawn(Constant):
    """A step takes what was drawn for the one request in it."""

    each: Floats = field(default_factory=lambda: np.empty(0))

    def step_seconds(self, plan: StepPlan) -> float:
        return float(self.each[int(plan.chunks[0].request.id)])


def one_at_a_time() -> Scheduler:
    """A server: requests of one token, in order of arrival."""
    return make_scheduler(memory=make_memory(blocks=8, block_size=16), max_seqs=1)


def interval(values: Iterable[float]) -> tuple[float, float]:
    """The mean of one value for each seed, and half the width of its interval of 99.9 %."""
    found = np.fromiter(values, dtype=np.float64)
    assert len(found) == len(SEEDS), "T_999 is for so many seeds"
    return float(found.mean()), float(T_999 * found.std(ddof=1) / sqrt(len(found)))


def agrees(values: Iterable[float], expected: float, width: float = 0.3) -> None:
    """Assert that the interval holds what theory says, and is no wider than this part of it."""
    found, half = interval(values)
    assert abs(found - expected) < half, f"{found:.4g} ± {half:.2g}, expected {expected:.4g}"
    assert half < width * expected, "an interval so wide says nothing"
