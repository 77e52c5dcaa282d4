"""Agreement of a simulation with engine runs, and the spread of those among themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pagedsim.metrics.catalogue import latency_of
from pagedsim.metrics.metric import STATISTICS
from pagedsim.metrics.tables import Requests

SHOWN = ("ttft", "tpot", "e2e")
KEYS = (
    *(f"{name}_{statistic}" for name in SHOWN for statistic in STATISTICS),
    "output_tokens_per_s",
    "preemptions",
    "kv_utilisation_mean",
)
JUDGED = ("ttft_mean", "tpot_mean", "output_tokens_per_s")
"""Metrics that decide whether a regime agrees."""
SPREADS = 2.0
"""Errors up to so many times the engine's own spread count as agreement."""
WIDE = 0.25
"""A spread above which agreement within twice the spread is not conclusive."""


class Agreement(NamedTuple):
    """Agreement in one metric."""

    engine: float
    """Median over the engine's runs."""
    spread: float
    """Coefficient of variation over the engine's runs; NaN for one run."""
    simulator: float
    error: float
    """simulator / engine - 1; NaN if the engine's value is 0."""
    at_pace: float
    """Median error with the simulator scaled to the pace of each run, which excludes changes of the
    machine's speed. A diagnosis, not a prediction."""

    def verdict(self, tolerance: float) -> str:
        """Whether the error is acceptable, and by which criterion."""
        if abs(self.error) <= tolerance:
            return f"within {100 * tolerance:.0f} %"
        if abs(self.error) <= SPREADS * self.spread:
            return "within twice the spread" + ", too wide to tell" * (self.spread > WIDE)
        return "beyond"


class Nearness(NamedTuple):
    """Per-request agreement in one latency; the engine's value is the median of its runs."""

    mape: float
    """Mean of |simulator / engine - 1|."""
    pearson: float
    bias: float
    """simulator / engine - 1 of the means."""
    spread: float
    """Mean of |one run / the median - 1| over the engine's runs: the noise floor."""


@dataclass(frozen=True)
class Regime:
    """The same requests in several runs on the engine and one in the simulator."""

    name: str
    load: float
    """Offered load as a share of capacity."""
    rate: float
    tolerance: float
    engine: Sequence[Mapping[str, Any]]
    """Summary of each run."""
    simulator: Mapping[str, Any]
    pace: Sequence[float]
    """Measured over predicted total step time of each run: the part of an error due to step times
    or to a changed speed of the machine."""
    paced: Sequence[Mapping[str, Any]]
    """The simulator's summaries, scaled to the pace of each run."""
    engine_requests: Sequence[pa.Table]
    simulator_requests: pa.Table

    def agreements(self) -> dict[str, Agreement]:
        """Agreement by metric."""
        return {key: self._agreement(key) for key in KEYS}

    def verdicts(self) -> dict[str, str]:
        """Verdicts by judged metric."""
        found = self.agreements()
        return {key: found[key].verdict(self.tolerance) for key in JUDGED}

    def nearness(self) -> dict[str, Nearness]:
        """Per-request agreement by latency."""
        mine = Requests.of(self.simulator_requests)
        runs = [Requests.of(table) for table in self.engine_requests]
        return {
            name: _nearness(latency_of(name, mine), [latency_of(name, run) for run in runs])
            for name in SHOWN
        }

    def _agreement(self, key: str) -> Agreement:
        values = [float(summary[key]) for summary in self.engine]
        middle, mine = float(np.median(values)), float(self.simulator[key])
        spread = math.nan
        if len(values) > 1:
            spread = float(np.std(values, ddof=1) / np.mean(values)) if any(values) else 0.0
        paced = [float(summary[key]) for summary in self.paced]
        at_pace = np.median([_error(mine, run) for mine, run in zip(paced, values, strict=True)])
        return Agreement(middle, spread, mine, _error(mine, middle), float(at_pace))


def _error(simulator: float, engine: float) -> float:
    if not engine:
        return math.nan if simulator else 0.0
    return simulator / engine - 1


def _nearness(mine: NDArray[np.float64], runs: Sequence[NDArray[np.float64]]) -> Nearness:
    every = np.array([*runs, mine])
    known = ~np.isnan(every).any(axis=0) & (every > 0).all(axis=0)
    if not known.any():
        return Nearness(math.nan, math.nan, math.nan, math.nan)
    engine, mine = every[:-1, known], every[-1, known]
    middle = np.median(engine, axis=0)
    varies = middle.std() > 0 and mine.std() > 0
    return Nearness(
        float(np.abs(mine / middle - 1).mean()),
        float(np.corrcoef(middle, mine)[0, 1]) if varies else math.nan,
        float(mine.mean() / middle.mean() - 1),
        float(np.abs(engine / middle - 1).mean()) if len(engine) > 1 else math.nan,
    )
