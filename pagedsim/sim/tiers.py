"""Transfer times of memory tiers below the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pagedsim.core import StepPlan, Tier
from pagedsim.core.memory import Place


@dataclass(frozen=True)
class Way:
    """The timing of one direction of a link."""

    latency: float
    """Seconds before the first block of a transfer."""
    block: float
    """Seconds per block."""

    def seconds(self, blocks: int) -> float:
        return self.latency + blocks * self.block


class Link:
    """The link to a tier: reads and writes are two independent FIFO queues.

    The end of a transfer is known when it is enqueued, so no simulation events are needed.
    """

    def __init__(self, read: Way, write: Way) -> None:
        self.reading = read
        self.writing = write
        self._read_until = 0.0
        self._write_until = 0.0
        self._written: dict[int, float] = {}  # blocks in transfer, and when each arrives

    def write(self, blocks: Sequence[int], now: float) -> float:
        """Enqueue a write; returns when it ends."""
        while self._written and (first := next(iter(self._written.items())))[1] <= now:
            del self._written[first[0]]
        end = max(now, self._write_until) + self.writing.seconds(len(blocks))
        self._write_until = end
        for block in blocks:
            self._written.pop(block, None)  # keeps the order of their ends
            self._written[block] = end
        return end

    def read(self, blocks: Sequence[int], now: float) -> float:
        """Enqueue a read, which waits for pending writes of these blocks; returns when it ends."""
        written = max(self._written.get(block, now) for block in blocks)
        begin = max(now, written, self._read_until)
        self._read_until = begin + self.reading.seconds(len(blocks))
        return self._read_until


@dataclass(frozen=True)
class Level:
    """A tier with its link; may be shared by several servers."""

    tier: Tier
    link: Link


class Tiers:
    """The memory tiers below a server's GPU.

    With `layers` a step computes each layer once its KV cache is loaded, while later layers load;
    without, it begins once everything is loaded. Writes overlap with steps. Written blocks can be
    found at once; a load before the write has ended waits for it.
    """

    def __init__(self, levels: Sequence[Level], layers: int | None = None) -> None:
        self.levels = tuple(levels)
        self.layers = layers

    def end(self, plan: StepPlan, now: float, begin: float, end: float) -> float:
        """The end of a step including its moves, which would otherwise run from `begin` to `end`.

        The moves start at `now`.
        """
        loaded = self._carried(plan, now)
        if loaded <= begin:
            return end
        load, compute = loaded - begin, end - begin
        if self.layers is None:
            return begin + load + compute
        # A pipeline of two stages: the longer one, plus one layer of the other.
        return begin + max(load, compute) + min(load, compute) / self.layers

    def _carried(self, plan: StepPlan, now: float) -> float:
        """Enqueue a plan's moves; returns when those to the GPU end."""
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
        """Enqueue the parts of swaps below the first tier; returns when the loads end."""
        for level, blocks in _below_the_first(out).items():
            self._link(level).write(blocks, now)
        ends = [self._link(n).read(blocks, now) for n, blocks in _below_the_first(back).items()]
        return max(ends, default=now)

    def _link(self, level: int) -> Link:
        return self.levels[level - 1].link


def _below_the_first(places: Sequence[Place]) -> dict[int, list[int]]:
    """Blocks below the first tier, by level."""
    by_level: dict[int, list[int]] = defaultdict(list)
    for level, block in places:
        if level > 1:
            by_level[level].append(block)
    return by_level
