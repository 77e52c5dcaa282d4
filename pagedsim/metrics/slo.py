"""A service level objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.errors import require_number

BOUNDED = ("ttft", "tpot", "e2e")
"""The latencies that may have a bound."""


@dataclass(frozen=True)
class Slo:
    """Bounds in seconds that a request must meet, all of them."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in BOUNDED:
            if (bound := getattr(self, name)) is not None:
                require_number(f"slo.{name}", bound, 0)

    def met(self, latencies: Mapping[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
        """Which requests met it; one without a TPOT has no TPOT to miss."""
        met = ~np.isnan(latencies["e2e"])
        for name in BOUNDED:
            if (bound := getattr(self, name)) is not None:
                met &= ~(latencies[name] > bound)
        return met
