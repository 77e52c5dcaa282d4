"""Comparison of arms: effect sizes and confidence intervals.

Comparisons are paired by seed, so variation that all arms share, such as the requests, cancels. A
change is the geometric mean of the seeds' ratios, since a seed's load scales both arms; no heavy
seed dominates. Intervals are Student's t at 95 %: wide with few seeds, none with one.

There is no correction for multiple comparisons: of twenty equal arms, one looks different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pagedsim.core.contracts import is_ours
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of, metric_of, summary_key
from pagedsim.metrics.metric import LESS
from pagedsim.metrics.tables import Floats
from pagedsim.metrics.variation import Cell

# The 97.5 % quantile of Student's t for 1, 2, 3... degrees of freedom. Importing
# scipy.special.stdtrit instead would add 0.2 s to every command that reports an interval.
# fmt: off
_T = (
    12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
    2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596,
    2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227,
)
# fmt: on
_Z = 1.959964  # the limit of t


def student_t(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t with `freedom` degrees of freedom."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    # Cornish-Fisher expansion, accurate to five digits from here on.
    z, n = _Z, freedom
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / (4 * n) + second / n**2 + third / n**3


SAME = 1e-12
"""Relative difference up to which values are equal."""


class Estimate(NamedTuple):
    """A mean and its 95 % confidence interval; NaN bounds if there is none."""

    mean: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)

    @property
    def sides(self) -> tuple[float, float]:
        """How far the interval reaches below the mean, and above it; zeros without one."""
        return (self.mean - self.low, self.high - self.mean) if self.known else (0.0, 0.0)


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over seeds, without NaN values.

    If all seeds are equal, as for a recorded trace, there is no interval.
    """
    known = np.asarray([value for value in values if not math.isnan(value)], dtype=np.float64)
    if not len(known):
        return NO_ESTIMATE
    mean = float(known.mean())
    if len(known) == 1:
        return Estimate(mean, math.nan, math.nan)
    deviation = float(known.std(ddof=1))
    if deviation <= SAME * float(np.abs(known).max()):
        return Estimate(mean, math.nan, math.nan)
    reach = student_t(len(known) - 1) * deviation / math.sqrt(len(known))
    return Estimate(mean, mean - reach, mean + reach)


def estimate_of(key: str, values: Sequence[float]) -> Estimate:
    """The mean over seeds of a metric. Its interval leaves out what the metric cannot be, which
    takes nothing from its coverage: values below zero, and shares above one."""
    value = estimate(values)
    known = [number for number in values if not math.isnan(number)]
    if not value.known or min(known) < 0:  # a metric of a user's own may be
        return value
    metric = metric_of(key)
    part = metric.unit == "share" and metric.better != LESS and is_ours(metric.of)
    return value._replace(low=max(value.low, 0.0), high=min(value.high, 1.0 if part else math.inf))


def paired_ratio(ours: Sequence[float] | Floats, theirs: Sequence[float] | Floats) -> Estimate:
    """The geometric mean over seeds of the ratio of ours to theirs.

    NaN without seeds, or for a value of 0 or below.
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if not len(a) or min(a.min(), b.min()) <= 0:
        return NO_ESTIMATE
    logs = np.log(a / b)
    if float(np.ptp(logs)) <= SAME:
        return Estimate(float(a[0] / b[0]), math.nan, math.nan)
    return Estimate(*map(math.exp, estimate(list(logs))))


@dataclass(frozen=True)
class Comparison:
    """One metric of one arm against the baseline's, over common seeds."""

    arm: str
    baseline: str
    key: str
    client: str | None
    """None: all requests together."""
    seeds: int
    ours: float
    theirs: float
    difference: Estimate
    ratio: Estimate
    """Geometric mean over seeds of ours over theirs; NaN if theirs is 0 or any is negative."""

    @property
    def sure(self) -> bool:
        """Whether the interval excludes "no difference".

        The interval is that of the ratio if there is one, otherwise that of the difference.
        """
        if self.ratio.known:
            return not self.ratio.low <= 1 <= self.ratio.high
        return self.difference.known and not self.difference.low <= 0 <= self.difference.high

    @property
    def gain(self) -> bool | None:
        """Whether the arm is better; None if equal or the metric has no better direction."""
        way = metric_of(self.key).better
        if not way or self.ours == self.theirs:
            return None
        more = self.ours > self.theirs if math.isnan(self.ratio.mean) else self.ratio.mean > 1
        return more == (way > 0)


def compare(study: Arms, metrics: Iterable[str] | None = None) -> list[Comparison]:
    """Compare every other arm with the baseline in `metrics` (default: the study's), within each
    cell of the conditions if there are any.

    For several clients, per-client comparisons precede those of all requests.
    """
    arms = study.arms
    if not arms:
        return []
    if study.variation.conditions:
        return [change for cell in study.cells for change in _within(study, cell, metrics)]
    baseline = baseline_of(study)
    comparisons = []
    for arm in arms:
        if arm == baseline:
            continue
        for client in groups_of(study):
            for key in keys_of(study.metrics if metrics is None else metrics):
                comparison = compare_two(study, arm, baseline, key, client)
                if comparison is not None:
                    comparisons.append(comparison)
    return comparisons


def _within(study: Arms, cell: Cell, metrics: Iterable[str] | None) -> Iterator[Comparison]:
    """The comparisons of a cell, with the arms' own names; none if it lacks the baseline."""
    variation, inside = study.variation, study.within(cell)
    if not inside.compared:
        return
    arms = {variation.series[arm]: arm for arm in study.arms if variation.cell_of(arm) == cell}
    for change in compare(inside, metrics):
        yield replace(change, arm=arms[change.arm], baseline=arms[change.baseline])


def baseline_of(study: Arms) -> str:
    """The baseline of comparisons: the first arm, unless the study names one."""
    return study.baseline if study.baseline in study.arms else study.arms[0]


def groups_of(study: Arms) -> list[str | None]:
    """The clients, if there are several, and None for all requests."""
    return [*(study.clients if len(study.clients) > 1 else ()), None]


def value_of(summary: dict[str, Any], key: str, client: str | None = None) -> float:
    """A metric of a summary; NaN if missing."""
    group = summary if client is None else summary.get("clients", {}).get(client, {})
    value = group.get(summary_key(key))
    return math.nan if value is None else float(value)


def values_of(study: Arms, arm: str, key: str, client: str | None = None) -> dict[int, float]:
    """A metric of an arm by seed, where known."""
    values = {run.seed: value_of(run.summary, key, client) for run in study.of(arm)}
    return {seed: value for seed, value in values.items() if not math.isnan(value)}


def means_of(study: Arms, client: str | None = None) -> dict[str, dict[str, float]]:
    """Means over the seeds of each arm's metrics that have values."""
    keys = keys_of(study.metrics)
    values = {arm: {key: values_of(study, arm, key, client) for key in keys} for arm in study.arms}
    return {
        arm: {key: estimate([*seeds.values()]).mean for key, seeds in of.items() if seeds}
        for arm, of in values.items()
    }


def compare_two(
    study: Arms, arm: str, baseline: str, key: str, client: str | None = None
) -> Comparison | None:
    """Compare two arms in one metric; None without a common seed."""
    ours, theirs = values_of(study, arm, key, client), values_of(study, baseline, key, client)
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    a = np.asarray([ours[seed] for seed in seeds])
    b = np.asarray([theirs[seed] for seed in seeds])
    return Comparison(
        arm,
        baseline,
        key,
        client,
        len(seeds),
        float(a.mean()),
        float(b.mean()),
        estimate(list(a - b)),
        _ratio(a, b),
    )


def _ratio(ours: Floats, theirs: Floats) -> Estimate:
    """The mean of ratios if every seed has one, otherwise the ratio of means, whose interval has
    its nominal coverage only if seeds are similar."""
    if (least := min(ours.min(), theirs.min())) > 0:
        return paired_ratio(ours, theirs)
    if least < 0 or not theirs.mean():
        return NO_ESTIMATE
    if not ours.mean():
        return Estimate(0.0, math.nan, math.nan)
    ratio = float(ours.mean() / theirs.mean())
    deviations = (ours - ratio * theirs) / ours.mean()
    if float(np.abs(deviations).max()) <= SAME:  # such as when all but one seed are 0
        return Estimate(ratio, math.nan, math.nan)
    spread = estimate(list(deviations))
    reach = (spread.high - spread.low) / 2
    return Estimate(ratio, ratio * math.exp(-reach), ratio * math.exp(reach))
