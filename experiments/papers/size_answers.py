"""How long answers took, run by run, and one arm's beside another's under the same seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import Estimate, paired_ratio
from pagedsim.run.parts import backend_of
from pagedsim.workload.predictor import kendall

Floats = NDArray[np.float64]
SAMPLE = 500
"""Requests by which an agreement of orders is measured."""


@dataclass(frozen=True)
class Answers:
    """The requests that one run finished."""

    seconds: Floats
    """End to end, of each."""
    tokens: Floats
    span: float
    """From the first arrival to the last token."""

    @property
    def a_token(self) -> Floats:
        """Normalized latency: seconds end to end for each token of an answer."""
        return self.seconds / self.tokens

    @property
    def per_second(self) -> float:
        """Requests finished a second."""
        return len(self.seconds) / self.span


Arms = Mapping[str, Sequence[Answers]]
"""Of each arm, a seed each."""
Measure = Callable[[Answers], float]
MEASURES: Mapping[str, Measure] = {
    "mean": lambda answers: float(answers.a_token.mean()),
    "P90": lambda answers: float(np.percentile(answers.a_token, 90)),
    "P95": lambda answers: float(np.percentile(answers.a_token, 95)),
}
"""Of the seconds a token, as the publications have them."""


def answers_of(run: Run) -> Answers:
    """Those of a run; raises ConfigError where it has finished nothing."""
    table = run.requests("arrival", "finished", "output_tokens")
    arrival, finished, tokens = (
        np.asarray(table[name].to_numpy(), dtype=np.float64) for name in table.column_names
    )
    done = ~np.isnan(finished) & (tokens > 0)
    if not done.any():
        raise ConfigError(f"{run.arm}: no request was finished")
    span = float(finished[done].max() - arrival.min())
    return Answers((finished - arrival)[done], tokens[done], span)


def over_seeds(runs: Sequence[Answers], measure: Measure) -> float:
    """The mean over seeds."""
    return float(np.mean([measure(run) for run in runs]))


def against(ours: Sequence[Answers], theirs: Sequence[Answers], measure: Measure) -> Estimate:
    """Ours over theirs, with an interval where there are several seeds."""
    return paired_ratio([measure(run) for run in ours], [measure(run) for run in theirs])


def agreement(run: Run) -> float:
    """Kendall's tau of predicted and true lengths; NaN where nobody predicts, or all alike."""
    workload = backend_of(run.config).workload(run.config, run.seed)
    guess = workload.predicted_len[:SAMPLE].astype(np.float64)
    if np.isnan(guess).any():
        return math.nan
    return kendall(workload.output_len[:SAMPLE].astype(np.float64), guess)


def in_words(value: Estimate, unit: str = "") -> str:
    """Such as "1.92 (1.80 to 2.05)": the interval of 95 % confidence stands behind."""
    if math.isnan(value.mean):
        return "–"
    interval = f" ({cell(value.low)} to {cell(value.high)})" if value.known else ""
    return f"{cell(value.mean)}{unit}{interval}"


def cell(value: float) -> str:
    """Three digits that count."""
    return "–" if math.isnan(value) else f"{value:#.3g}".rstrip(".")
