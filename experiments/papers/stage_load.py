"""How many requests are in each stage of a fleet over time, and who is refused between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run

Floats = NDArray[np.float64]
STEP = 1.0
"""Seconds between two looks at the loads."""


@dataclass(frozen=True)
class Loads:
    """Of one arm; means over its seeds."""

    refused: float
    """Share of all requests."""
    late: float
    """Of them, those whose prompt had been computed; as a share of all."""
    slow: float
    """Served with more time between tokens than the objective, as a share of all."""
    prefill: float
    """Mean seconds to the end of the prompt, of who came to decode."""
    decode: float
    """And from there to the end."""
    queue_swing: float
    """Standard deviation over time of the requests in prefill, over their mean."""
    swing: float
    """The same of those that decode."""
    together: float
    """The correlation of the two over time."""
    by_seed: Sequence[float]
    """`refused` under each."""
    seconds: Sequence[float]
    """The times of the first seed's loads."""
    in_prefill: Sequence[int]
    in_decode: Sequence[int]

    def curves(self) -> dict[str, list[float]]:
        """The first seed's loads over time, to be drawn."""
        return {
            "seconds": list(self.seconds),
            "prefill": list(self.in_prefill),
            "decode": list(self.in_decode),
        }


def loads(runs: Sequence[Run], warm_up: float, span: float) -> Loads:
    """Those of an arm, from the warm-up to the last arrival; `span` seconds of them as curves."""
    every = [_Run(run, warm_up) for run in runs]

    def mean(of: Callable[[_Run], float]) -> float:
        return fmean(of(one) for one in every)

    first = every[0]
    drawn = first.times < warm_up + span
    return Loads(
        refused=mean(lambda one: float(one.refused.mean())),
        late=mean(lambda one: float(one.late.mean())),
        slow=mean(lambda one: float(one.slow.mean())),
        prefill=mean(lambda one: _mean(one.left - one.arrival)),
        decode=mean(lambda one: _mean(one.finished - one.boarded)),
        queue_swing=mean(lambda one: _swing(one.in_prefill)),
        swing=mean(lambda one: _swing(one.in_decode)),
        together=mean(lambda one: _together(one.in_prefill, one.in_decode)),
        by_seed=[float(one.refused.mean()) for one in every],
        seconds=first.times[drawn].tolist(),
        in_prefill=first.in_prefill[drawn].tolist(),
        in_decode=first.in_decode[drawn].tolist(),
    )


class _Run:
    """One run: who is refused, and the loads over time."""

    def __init__(self, run: Run, warm_up: float) -> None:
        requests = run.by_column()
        self.arrival, self.finished = requests["arrival"], requests["finished"]
        self.left, self.boarded = requests["left"], requests["boarded"]
        self.refused = requests.are("rejected")
        self.late = self.refused & ~np.isnan(requests["first_token"])
        with np.errstate(invalid="ignore", divide="ignore"):
            between = (self.finished - self.boarded) / (requests["output_tokens"] - 1)
            self.slow = ~self.refused & (between > float(run.config["router"]["tbt"]))
        last = float(self.arrival.max())
        if last <= warm_up:
            raise ConfigError(
                f"study.warm_up={warm_up:g}: must be shorter than the {last:.0f} s of arrivals"
            )
        self.times = np.arange(warm_up, last, STEP)
        gone = np.where(np.isnan(self.left), self.finished, self.left)
        self.in_prefill = _there(self.arrival, gone, self.times)
        there = ~np.isnan(self.boarded)
        self.in_decode = _there(self.boarded[there], self.finished[there], self.times)


def _there(begin: Floats, end: Floats, times: Floats) -> NDArray[np.int64]:
    """How many have begun and not ended at each time."""
    begun = np.searchsorted(np.sort(begin), times, side="right")
    return begun - np.searchsorted(np.sort(end), times, side="right")


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _swing(load: NDArray[np.int64]) -> float:
    mean = float(load.mean())
    return float(load.std()) / mean if mean else 0.0


def _together(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    spread = float(one.std() * other.std())
    return float(np.mean((one - one.mean()) * (other - other.mean()))) / spread if spread else 0.0
