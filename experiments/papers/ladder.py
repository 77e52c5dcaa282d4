"""Stages of rising rates: what a load generator measures of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import numpy as np

from pagedsim.metrics.arms import Run
from pagedsim.workload.stages import stages_of


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One stage, from its first arrival to its last answer."""

    tokens: float
    """Of answers, a second."""
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ntpot_p50: float
    """Milliseconds from the arrival to the last token, over tokens."""
    cached: float
    """The share of prompt tokens that caches had."""
    preemptions: float
    """A request."""


UNITS = {"tokens": "/s", "ttft_mean": "s", "ttft_p50": "s", "ttft_p90": "s", "ntpot_p50": "ms"}
"""Of what load generators tell."""


def by_rate(runs: Sequence[Run]) -> dict[float, Measured]:
    """Each stage after the first, which warms caches; means over seeds."""
    seeds = [_by_rate(run) for run in runs]
    return {rate: _mean([each[rate] for each in seeds]) for rate in seeds[0]}


def _by_rate(run: Run) -> dict[float, Measured]:
    stages = stages_of(run.config["workload"]["stages"])
    ends = accumulate((stage.requests for stage in stages), initial=0)
    rows = [slice(begin, end) for begin, end in pairwise(ends)]
    return {
        stage.rate: _measured(run, own) for stage, own in zip(stages[1:], rows[1:], strict=True)
    }


def _measured(run: Run, rows: slice) -> Measured:
    table = run.by_column()
    arrival, first, finished, tokens, prompt, cached, preempted = (
        table[name][rows]
        for name in (
            *("arrival", "first_token", "finished", "output_tokens"),
            *("prompt_tokens", "cached_tokens", "preemptions"),
        )
    )
    return Measured(
        tokens=float(tokens.sum() / (finished.max() - arrival.min())),
        ttft_mean=float(np.mean(first - arrival)),
        ttft_p50=float(np.median(first - arrival)),
        ttft_p90=float(np.quantile(first - arrival, 0.9)),
        ntpot_p50=float(1e3 * np.median((finished - arrival) / tokens)),
        cached=float(cached.sum() / prompt.sum()),
        preemptions=float(preempted.mean()),
    )


def _mean(every: Sequence[Measured]) -> Measured:
    names = [one.name for one in fields(Measured)]
    return Measured(
        **{name: float(np.mean([getattr(one, name) for one in every])) for name in names}
    )
