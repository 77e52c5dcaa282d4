"""Comparison of arms: effect sizes and confidence intervals.

Comparisons are paired by seed, so variation that all arms share, such as the requests, cancels. A
seed's load scales all arms, so means over seeds are geometric where all values are positive: no
heavy seed dominates, and the geometric mean of the seeds' ratios is the ratio of two such means.
Otherwise means are arithmetic, and so is what is compared. `Column` decides which. Intervals are
Student's t at 95 %: wide with few seeds, none with one.

There is no correction for multiple comparisons: of twenty equal arms, one looks different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pagedsim.core.contracts import is_ours
from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.catalogue import keys_of, metric_of, summary_key
from pagedsim.metrics.metric import LESS
from pagedsim.metrics.tables import Floats

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


def estimate(values: Iterable[float]) -> Estimate:
    """The arithmetic mean over seeds, without NaN values.

    If all seeds are equal, as for a recorded trace, there is no interval.
    """
    known = _known(values)
    return _student(known, SAME * float(np.abs(known).max(initial=0.0)))


def geometric(values: Iterable[float]) -> Estimate:
    """The geometric mean over seeds of positive values, without NaN; its interval is that of the
    logarithms' mean."""
    known = _known(values)
    logs = _student(np.log(known), SAME)
    if logs.known:
        return Estimate(*map(math.exp, logs))
    return NO_ESTIMATE._replace(mean=float(known[0])) if len(known) else NO_ESTIMATE


def _known(values: Iterable[float]) -> Floats:
    return np.asarray([value for value in values if not math.isnan(value)], dtype=np.float64)


def _student(known: Floats, same: float) -> Estimate:
    """The mean; without an interval if values are within `same`."""
    if not len(known):
        return NO_ESTIMATE
    mean = float(known.mean())
    if float(np.ptp(known)) <= same:
        return NO_ESTIMATE._replace(mean=mean)
    reach = student_t(len(known) - 1) * float(known.std(ddof=1)) / math.sqrt(len(known))
    return Estimate(mean, mean - reach, mean + reach)


def average(values: Sequence[float]) -> Estimate:
    """The mean over seeds by these values alone: of a single arm, or of rates, which are positive
    under every arm."""
    return geometric(values) if positive(values) else estimate(values)


def positive(values: Iterable[float]) -> bool:
    """Whether none that is known is 0 or below, so that means over seeds are geometric."""
    return not any(value <= 0 for value in values)


def paired_ratio(ours: Sequence[float] | Floats, theirs: Sequence[float] | Floats) -> Estimate:
    """The geometric mean over seeds of the ratio of ours to theirs.

    NaN without seeds, or for a value of 0 or below.
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if not len(a) or min(a.min(), b.min()) <= 0:
        return NO_ESTIMATE
    return geometric((a / b).tolist())


@dataclass(frozen=True)
class Comparison:
    """One metric of one arm against another's, over common seeds."""

    arm: str
    baseline: str
    key: str
    client: str | None
    """None: all requests together."""
    seeds: int
    ours: float
    theirs: float
    """Means over seeds."""
    difference: Estimate
    """Of geometric means, what the ratio makes of theirs."""
    ratio: Estimate
    """Of ours to theirs; NaN if theirs is 0 or any value is negative."""
    geometric: bool
    """Whether the means are."""

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
        return (self.ours > self.theirs) == (way > 0)


def compare(study: Arms, metrics: Iterable[str] | None = None) -> list[Comparison]:
    """Compare every other arm with the baseline in `metrics` (default: the study's), within each
    cell of the conditions if there are any.

    For several clients, per-client comparisons precede those of all requests.
    """
    keys = keys_of(study.metrics if metrics is None else metrics)
    return [
        replace(change, arm=names[change.arm], baseline=names[change.baseline])
        for inside, names in each_cell(study)
        if inside.compared or not study.variation.conditions
        for change in _against_baseline(inside, keys)
    ]


def each_cell(study: Arms) -> Iterator[tuple[Arms, Mapping[str, str]]]:
    """The arms that are compared with each other, and the study's names for them: those of each
    cell of the conditions, or all."""
    if not study.variation.conditions:
        yield study, {arm: arm for arm in study.arms}
        return
    for cell in study.cells:
        arms = [arm for arm in study.arms if study.variation.cell_of(arm) == cell]
        yield study.within(cell), {study.variation.series[arm]: arm for arm in arms}


def _against_baseline(study: Arms, keys: Sequence[str]) -> Iterator[Comparison]:
    columns = [column_of(study, key, client) for client in groups_of(study) for key in keys]
    for arm in study.arms:
        for column in columns if arm != baseline_of(study) else ():
            if (change := column.compare(arm, baseline_of(study))) is not None:
                yield change


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
    return _by_seed(study.of(arm), key, client)


def _by_seed(runs: Iterable[Run], key: str, client: str | None) -> dict[int, float]:
    values = {run.seed: value_of(run.summary, key, client) for run in runs}
    return {seed: value for seed, value in values.items() if not math.isnan(value)}


def means_of(study: Arms, client: str | None = None) -> dict[str, dict[str, float]]:
    """Means over the seeds of each arm's metrics that have values."""
    means: dict[str, dict[str, float]] = {arm: {} for arm in study.arms}
    for inside, names in each_cell(study):
        for column in (column_of(inside, key, client) for key in keys_of(study.metrics)):
            for arm in column.arms:
                means[names[arm]][column.key] = column.mean(arm)
    return means


@dataclass(frozen=True)
class Column:
    """One metric of arms that are compared, by arm and seed: the one place that says what means are
    over, so that whatever is printed beside a change is what it is a change of."""

    values: Mapping[str, Mapping[int, float]]
    """Without NaN; the baseline's first."""
    key: str = ""
    client: str | None = None

    @property
    def arms(self) -> list[str]:
        """Those with a value."""
        return [arm for arm, of in self.values.items() if of]

    @cached_property
    def seeds(self) -> frozenset[int]:
        """Those that all arms have: means over others would hold one arm's luck against another's.
        An arm that has none of those before it excludes no other, and is compared with none."""
        shared = frozenset[int]()
        for of in self.values.values():
            shared = (shared & of.keys()) or shared or frozenset(of)
        return shared

    def of(self, arm: str) -> list[float]:
        """The values of an arm that are averaged, by seed."""
        mine = self.values[arm]
        return [mine[seed] for seed in sorted(self.seeds if self._shares(arm) else mine)]

    def _shares(self, arm: str) -> bool:
        return self.values[arm].keys() >= self.seeds

    @cached_property
    def geometric(self) -> bool:
        """Whether means are geometric: if all values of all arms are positive."""
        return all(positive(self.of(arm)) for arm in self.arms)

    def mean(self, arm: str) -> float:
        """The mean over seeds; NaN without any."""
        return self.estimate(arm).mean

    def estimate(self, arm: str) -> Estimate:
        """The mean over seeds. Its interval leaves out what the metric cannot be, which takes
        nothing from its coverage: values below zero, and shares above one."""
        values = self.of(arm)
        value = geometric(values) if self.geometric else estimate(values)
        if not value.known or min(values) < 0:  # a metric of a user's own may be
            return value
        most = 1.0 if self.key and _is_part(self.key) else math.inf
        return value._replace(low=max(value.low, 0.0), high=min(value.high, most))

    def compare(self, arm: str, other: str) -> Comparison | None:
        """Compare two arms; None without a common seed."""
        if not self.seeds or not (self._shares(arm) and self._shares(other)):
            return None
        a, b = (np.asarray(self.of(name), dtype=np.float64) for name in (arm, other))
        ours, theirs = self.mean(arm), self.mean(other)
        if self.geometric:
            ratio = paired_ratio(a, b)
            difference = Estimate(*(theirs * (end - 1) for end in ratio))
        else:
            ratio, difference = ratio_of_means(a, b), estimate(a - b)
        return Comparison(
            *(arm, other, self.key, self.client, len(a), ours, theirs, difference, ratio),
            geometric=self.geometric,
        )


def _is_part(key: str) -> bool:
    """Whether it is at most one: a share of which less is better, or of a user's own, may not
    be."""
    metric = metric_of(key)
    return metric.unit == "share" and metric.better != LESS and is_ours(metric.of)


def column_of(study: Arms, key: str, client: str | None = None) -> Column:
    """A metric of a study's arms; under conditions, of those within one cell."""
    arms = sorted(study.arms, key=lambda arm: arm != study.baseline)
    return column_of_runs({arm: study.of(arm) for arm in arms}, key, client)


def column_of_runs(
    runs: Mapping[str, Sequence[Run]], key: str, client: str | None = None
) -> Column:
    """A metric of arms that are compared, by their runs; the baseline's come first."""
    return Column({arm: _by_seed(some, key, client) for arm, some in runs.items()}, key, client)


def ratio_of_means(ours: Floats, theirs: Floats) -> Estimate:
    """The ratio of arithmetic means, whose interval has its nominal coverage only if seeds are
    similar; NaN if theirs is 0 or any value is negative."""
    if min(ours.min(), theirs.min()) < 0 or not theirs.mean():
        return NO_ESTIMATE
    if not ours.mean():
        return NO_ESTIMATE._replace(mean=0.0)
    ratio = float(ours.mean() / theirs.mean())
    deviations = (ours - ratio * theirs) / ours.mean()
    if float(np.abs(deviations).max()) <= SAME:  # such as when all but one seed are 0
        return NO_ESTIMATE._replace(mean=ratio)
    spread = estimate(deviations)
    reach = (spread.high - spread.low) / 2
    return Estimate(ratio, ratio * math.exp(-reach), ratio * math.exp(reach))
