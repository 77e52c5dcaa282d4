"""How far a server is behind its own clock."""

from __future__ import annotations

import logging
from collections import deque

log = logging.getLogger(__name__)

WINDOW = 10.0
"""Seconds over which the largest lag counts."""
LATE = 0.1
"""Seconds of lag from which latencies are no longer those of the model."""
AGAIN = 60.0
"""Seconds between two warnings."""


class Lag:
    """The largest lag of the last seconds, with a warning now and then where it is large.

    >>> lag = Lag()
    >>> lag.note(0.05, now=1.0)
    >>> lag.note(0.02, now=2.0)
    >>> lag.worst(5.0), lag.worst(11.5), lag.worst(20.0)
    (0.05, 0.02, 0.0)
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[float, float]] = deque()  # when, how much; ever smaller
        self._warned: float | None = None

    def note(self, seconds: float, now: float) -> None:
        """Outputs that were due `seconds` ago are passed on `now`."""
        while self._noted and self._noted[-1][1] <= seconds:
            self._noted.pop()
        self._noted.append((now, seconds))
        self.worst(now)  # or what is too old would stay
        if seconds >= LATE and (self._warned is None or now - self._warned >= AGAIN):
            self._warned = now
            log.warning(
                "tokens are passed on %.2f s after they are due: this machine is too slow for the "
                "load, and latencies are not the model's; lower the rate or speed=",
                seconds,
            )

    def worst(self, now: float) -> float:
        """The largest lag of the last seconds; 0 if there were no outputs."""
        while self._noted and now - self._noted[0][0] > WINDOW:
            self._noted.popleft()
        return self._noted[0][1] if self._noted else 0.0
