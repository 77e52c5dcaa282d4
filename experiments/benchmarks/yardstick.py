"""The unit that costs are counted in: one plain SimPy timeout on this machine, now."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import simpy


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
