"""Block transfers between the GPU and lower memory tiers: step columns and their sums."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pagedsim.core import StepPlan, Tier
from pagedsim.metrics.steps import REPLICA, Batches

LOADED, WRITTEN = "loaded_", "written_"
"""Prefixes of the step columns, followed by the name of a tier."""


class TierUse(NamedTuple):
    """Traffic of one tier."""

    loaded_tokens: int
    """Cached tokens that were loaded instead of computed."""
    written_blocks: int


class Moved:
    """Block moves of steps; sparse, one row per move."""

    def __init__(self) -> None:
        self._steps = array("q")  # which of all
        self._levels = array("q")
        self._loads = array("q")  # 1: to the GPU; 0: down to that level
        self._tiers: Sequence[Tier] = ()

    def of(self, tiers: Sequence[Tier]) -> None:
        """Set the tiers."""
        self._tiers = tiers

    def step(self, number: int, plan: StepPlan) -> None:
        """Record the moves of step `number`."""
        for source, target in plan.moves:
            self._steps.append(number)
            self._levels.append(target.level or source.level)
            self._loads.append(not target.level)

    def undo(self, number: int) -> None:
        """Remove the moves of step `number`, the last one."""
        while self._steps and self._steps[-1] == number:
            for column in (self._steps, self._levels, self._loads):
                column.pop()

    def columns(self, steps: int) -> dict[str, pa.Array]:
        """Blocks by tier for each of `steps` steps; empty without tiers."""
        which, levels, loads = map(np.array, (self._steps, self._levels, self._loads))
        found = {}
        for what, loaded in ((LOADED, 1), (WRITTEN, 0)):
            for level, tier in enumerate(self._tiers, 1):
                mine = which[(levels == level) & (loads == loaded)]
                blocks = np.bincount(mine, minlength=steps).astype(np.int32)
                found[what + tier.name] = pa.array(blocks)
        return found


def tiers_of(steps: Batches, sizes: Sequence[float]) -> dict[str, TierUse] | None:
    """Traffic of each tier; None without tiers. `sizes` are the block sizes of the replicas."""
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
