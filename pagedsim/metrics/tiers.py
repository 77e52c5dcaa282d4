"""Blocks between the GPU and the tiers below it: columns of steps, and what they sum up to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pagedsim.core import StepPlan, Tier
from pagedsim.metrics.steps import REPLICA, Batches

LOADED, WRITTEN = "loaded_", "written_"
"""What the columns of steps begin with, before the name of a tier."""


class TierUse(NamedTuple):
    """What a run did with one tier."""

    loaded_tokens: int
    """Tokens that were found there and loaded, not computed."""
    written_blocks: int


class Moved:
    """What steps moved: one row for each that moved anything, and they are few."""

    def __init__(self) -> None:
        self._steps = array("q")  # which of all
        self._levels = array("q")
        self._loads = array("q")  # 1: to the GPU; 0: down to that level
        self._tiers: Sequence[Tier] = ()

    def of(self, tiers: Sequence[Tier]) -> None:
        """The tiers that there are."""
        self._tiers = tiers

    def step(self, number: int, plan: StepPlan) -> None:
        """Note what a step moves, the `number`th of all."""
        for source, target in plan.moves:
            self._steps.append(number)
            self._levels.append(target.level or source.level)
            self._loads.append(not target.level)

    def undo(self, number: int) -> None:
        """That step, the last one, moved nothing."""
        while self._steps and self._steps[-1] == number:
            for column in (self._steps, self._levels, self._loads):
                column.pop()

    def columns(self, steps: int) -> dict[str, pa.Array]:
        """Blocks by step and tier, of so many steps; none where there are no tiers."""
        which, levels, loads = map(np.array, (self._steps, self._levels, self._loads))
        found = {}
        for what, loaded in ((LOADED, 1), (WRITTEN, 0)):
            for level, tier in enumerate(self._tiers, 1):
                mine = which[(levels == level) & (loads == loaded)]
                blocks = np.bincount(mine, minlength=steps).astype(np.int32)
                found[what + tier.name] = pa.array(blocks)
        return found


def tiers_of(steps: Batches, sizes: Sequence[float]) -> dict[str, TierUse] | None:
    """What each tier did; None where there are none. `sizes` are those of each replica's blocks."""
    names = [name.removeprefix(LOADED) for name in steps.schema.names if name.startswith(LOADED)]
    if not names:
        return None
    use = {name: TierUse(0, 0) for name in names}
    for batch in steps.to_batches():
        size = sizes[batch[REPLICA][0].as_py() if len(sizes) > 1 else 0]
        for name, before in use.items():
            loaded, written = (
                int(batch[what + name].to_numpy().sum()) for what in (LOADED, WRITTEN)
            )
            use[name] = TierUse(
                before.loaded_tokens + int(loaded * size), before.written_blocks + written
            )
    return use
