"""What an engine's time is counted by."""

from __future__ import annotations

import time
from collections.abc import Mapping


class WallClock:
    """Real time."""

    name = "wall"
    notice = ""

    def __call__(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


class CpuClock(WallClock):
    """The time that this process computes, whatever else the machine does; pauses take none."""

    name = "cpu"
    notice = "; times are of the processor, not of a wall clock"

    def __init__(self) -> None:
        self._slept = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._slept

    def sleep(self, seconds: float) -> None:
        self._slept += seconds


CLOCKS: Mapping[str, type[WallClock]] = {clock.name: clock for clock in (WallClock, CpuClock)}
