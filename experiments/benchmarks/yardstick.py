"""The unit that costs are counted in: one plain SimPy timeout on this machine, now."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from statistics import median
from typing import NamedTuple

import simpy


class Cost(NamedTuple):
    """What the same work took, round by round."""

    seconds: list[float]
    timeouts: list[float]
    """Of the same round: machines change while one measures."""

    def cells(self, digits: int, per: int = 1) -> list[str]:
        """As cells of a table: median and lowest seconds, median and lowest timeouts, `per` of
        which are one."""
        times = [f"{of(self.seconds):.{digits}f}" for of in (median, min)]
        return times + [f"{of(self.timeouts) / per:.1f}" for of in (median, min)]


def add(cost: Cost, work: Callable[[], object]) -> None:
    """Another round of some work, which takes turns with the yardstick."""
    before, took = timeout_seconds(), seconds(work)
    cost.seconds.append(took)
    cost.timeouts.append(2 * took / (before + timeout_seconds()))


def timeout_seconds(timeouts: int = 200_000) -> float:
    """Seconds that one timeout of an otherwise idle SimPy process takes."""
    environment = simpy.Environment()

    def wait() -> Generator[simpy.Event, None, None]:
        for _ in range(timeouts):
            yield environment.timeout(1.0)

    environment.process(wait())
    return seconds(environment.run) / timeouts


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call: on a shared machine it is steadier than the clock on the wall."""
    begun = time.process_time()
    work()
    return time.process_time() - begun
