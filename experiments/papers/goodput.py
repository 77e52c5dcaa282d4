"""What a run serves within an objective: a first token in time, and then no long wait for any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.papers.request_gaps import longest_gaps
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run


@dataclass(frozen=True, kw_only=True)
class Served:
    """What was given under a load; of who finished from the warm-up to the last question."""

    goodputs: tuple[float, ...]
    """Tokens/s of requests that kept the bound on gaps and each bound on the first token."""
    tokens: float
    """Tokens/s of all."""
    prompt: float
    """The share of requests that kept the first bound on the first token."""
    even: float
    """The share that kept the bound on gaps."""
    preemptions: float
    """A request, over the whole run."""
    kv: float
    """The share of memory in use, over the whole run."""

    @property
    def goodput(self) -> float:
        """By the whole objective."""
        return self.goodputs[0]

    @property
    def smooth(self) -> float:
        """By the last bound, that of gaps alone."""
        return self.goodputs[-1]


def served(run: Run, warm_up: float, bounds: Sequence[float], gap: float) -> Served:
    """Of one run; `bounds` are of the first token, the objective's before others."""
    names = ("arrival", "first_token", "finished", "output_tokens")
    table = run.requests(*names)
    arrival, first, finished, tokens = (np.asarray(table[name].to_numpy()) for name in names)
    last = float(arrival.max())
    counted = (finished > warm_up) & (finished <= last)
    if not counted.any():
        raise ConfigError(
            f"{run.arm}: nobody finishes between warm_up={warm_up:g} and the last question at "
            f"{last:.0f} s: must have a shorter warm_up, or more workload.requests"
        )
    even = longest_gaps(run) <= gap

    def rate(which: NDArray[np.bool_]) -> float:
        return float(tokens[counted & which].sum() / (last - warm_up))

    return Served(
        goodputs=tuple(rate(even & (first - arrival <= bound)) for bound in bounds),
        tokens=rate(counted),
        prompt=float((first - arrival <= bounds[0])[counted].mean()),
        even=float(even[counted].mean()),
        preemptions=run.summary["preemptions"] / run.summary["requests"],
        kv=run.summary["kv_utilisation_mean"],
    )


def over_seeds(every: Sequence[Served]) -> Served:
    """The mean of each."""

    def mean(name: str) -> float:
        return float(np.mean([getattr(one, name) for one in every]))

    return Served(
        goodputs=tuple(np.mean([one.goodputs for one in every], axis=0).tolist()),
        tokens=mean("tokens"),
        prompt=mean("prompt"),
        even=mean("even"),
        preemptions=mean("preemptions"),
        kv=mean("kv"),
    )


def ratio(ours: float, theirs: float) -> float:
    """NaN where there is nothing to divide by."""
    return ours / theirs if theirs else math.nan


def times(value: float) -> str:
    """For a reader."""
    return "–" if math.isnan(value) else f"{value:.2f} times"
