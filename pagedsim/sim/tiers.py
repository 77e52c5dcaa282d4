"""The tiers below the GPU in simulated time: how long it takes to write to them and to load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pagedsim.core import StepPlan, Tier
from pagedsim.core.memory import Place


@dataclass(frozen=True)
class Way:
    """One direction of a link."""

    latency: float
    """Seconds before the first block of a transfer is on its way."""
    block: float
    """Seconds for each block."""

    def seconds(self, blocks: int) -> float:
        """What one transfer takes."""
        return self.latency + blocks * self.block


class Link:
    """What leads to a tier: reads go one after another, writes likewise, beside each other.

    Each way is a queue in which nobody overtakes, worked out without an event: it is known when
    a transfer will be over as soon as it is asked for.
    """

    def __init__(self, read: Way, write: Way) -> None:
        self.reading = read
        self.writing = write
        self._read_until = 0.0
        self._write_until = 0.0
        self._written: dict[int, float] = {}  # blocks under way, and when each will be there

    def write(self, blocks: Sequence[int], now: float) -> float:
        """Blocks are sent there; returns when they will have come."""
        while self._written and (first := next(iter(self._written.items())))[1] <= now:
            del self._written[first[0]]
        end = max(now, self._write_until) + self.writing.seconds(len(blocks))
        self._write_until = end
        for block in blocks:
            self._written.pop(block, None)  # so that they stay in the order of their ends
            self._written[block] = end
        return end

    def read(self, blocks: Sequence[int], now: float) -> float:
        """Blocks are asked for; returns when they will have come. What is there comes first."""
        there = max(self._written.get(block, now) for block in blocks)
        begin = max(now, there, self._read_until)
        self._read_until = begin + self.reading.seconds(len(blocks))
        return self._read_until


@dataclass(frozen=True)
class Level:
    """A tier with its link; one object may be given to several servers."""

    tier: Tier
    link: Link


class Tiers:
    """All that lies below a server's GPU.

    With `layers` a step computes a layer as soon as what it needs of it is loaded, and loads the
    next ones meanwhile; without, it begins when everything is there. What is written down goes its
    way beside the steps, and is found from now on; who loads it before it has come waits for it.
    """

    def __init__(self, levels: Sequence[Level], layers: int | None = None) -> None:
        self.levels = tuple(levels)
        self.layers = layers

    def end(self, plan: StepPlan, now: float, begin: float, end: float) -> float:
        """When a step that would last from `begin` to `end` is over, its moves included.

        They are under way from `now` on.
        """
        loaded = self._carried(plan, now)
        if loaded <= begin:
            return end
        load, compute = loaded - begin, end - begin
        if self.layers is None:
            return begin + load + compute
        # In a pipeline of two stages the longer one decides, and one layer of the other is left.
        return begin + max(load, compute) + min(load, compute) / self.layers

    def _carried(self, plan: StepPlan, now: float) -> float:
        """Send a plan's moves on their way; returns when those to the GPU have come."""
        down: dict[int, list[int]] = defaultdict(list)
        up: dict[int, list[int]] = defaultdict(list)
        for source, target in plan.moves:
            if target.level:
                down[target.level].append(target.block)
            else:
                up[source.level].append(source.block)
        loaded = [self._link(level).read(blocks, now) for level, blocks in up.items()]
        for level, blocks in down.items():
            self._link(level).write(blocks, now)
        return max(loaded, default=now)

    def spilled(self, out: Sequence[Place], back: Sequence[Place], now: float) -> float:
        """Swaps cross the bus in any case; returns when those from below the first tier have."""
        for level, blocks in _below_the_first(out).items():
            self._link(level).write(blocks, now)
        ends = [self._link(n).read(blocks, now) for n, blocks in _below_the_first(back).items()]
        return max(ends, default=now)

    def _link(self, level: int) -> Link:
        return self.levels[level - 1].link


def _below_the_first(places: Sequence[Place]) -> dict[int, list[int]]:
    """Blocks by level."""
    found: dict[int, list[int]] = defaultdict(list)
    for level, block in places:
        if level > 1:
            found[level].append(block)
    return found
