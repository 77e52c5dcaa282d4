"""One arm against another: by how much, and how surely.

A comparison is paired: what is averaged over seeds is the difference within each, and what all arms
share, such as the same requests, cancels. What a seed's load does to both arms it does in
proportion, so a change is the geometric mean of the seeds' ratios, which no heavy seed outweighs.
Intervals are Student's t at 95 %, which with few seeds are wide; with one seed there is none.

Each interval stands for itself: of twenty comparisons of arms that do not differ, one looks sure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of, metric_of, summary_key
from pagedsim.metrics.tables import Floats

# The 97.5 % quantile of Student's t for 1, 2, 3... degrees of freedom. scipy.special.stdtrit has
# it, too, but its import would take 0.2 s of every command that tells of an interval (0.6 s for
# scipy.stats).
# fmt: off
_T = (
    12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
    2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596,
    2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227,
)
# fmt: on
_Z = 1.959964  # what t tends to


def student_t(freedom: int) -> float:
    """The t that 95 % of the distribution with `freedom` degrees of freedom lie within."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    # Cornish and Fisher's expansion, true to five digits from here on.
    z, n = _Z, freedom
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / (4 * n) + second / n**2 + third / n**3


SAME = 1e-12
"""Values no further apart than this, relative to their size, are the same."""


class Estimate(NamedTuple):
    """A mean and its 95 % confidence interval; NaN bounds where one value gives no interval."""

    mean: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over seeds; values that are not there (NaN) are left out.

    Seeds that all give the same say nothing about chance (a recorded trace has none), so then
    there is no interval.
    """
    there = np.asarray([value for value in values if not math.isnan(value)], dtype=np.float64)
    if not len(there):
        return NO_ESTIMATE
    mean = float(there.mean())
    if len(there) == 1:
        return Estimate(mean, math.nan, math.nan)
    deviation = float(there.std(ddof=1))
    if deviation <= SAME * float(np.abs(there).max()):
        return Estimate(mean, math.nan, math.nan)
    half = student_t(len(there) - 1) * deviation / math.sqrt(len(there))
    return Estimate(mean, mean - half, mean + half)


def paired_ratio(ours: Sequence[float] | Floats, theirs: Sequence[float] | Floats) -> Estimate:
    """The geometric mean of the ratios under each seed: of ours over theirs, in the same order.

    NaN where there is no seed, or a value of 0 or below.
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
    """One metric of one arm against the baseline's, over the seeds that both have."""

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
    """Ours over theirs: the geometric mean over seeds; NaN where theirs is 0, or any is below."""

    @property
    def sure(self) -> bool:
        """Whether the interval leaves no room for "no difference".

        It is that of the ratio; where there is none, that of the difference.
        """
        if self.ratio.known:
            return not self.ratio.low <= 1 <= self.ratio.high
        return self.difference.known and not self.difference.low <= 0 <= self.difference.high

    @property
    def gain(self) -> bool | None:
        """Whether the arm is the better one; None where neither way is better."""
        way = metric_of(self.key).better
        if not way or self.ours == self.theirs:
            return None
        more = self.ours > self.theirs if math.isnan(self.ratio.mean) else self.ratio.mean > 1
        return more == (way > 0)


def compare(study: Arms, metrics: Iterable[str] | None = None) -> list[Comparison]:
    """Every other arm against the baseline, in `metrics` (default: the study's).

    Each client comes first, where the study tells several apart, then all requests together.
    """
    arms = study.arms
    if not arms:
        return []
    baseline = baseline_of(study)
    found = []
    for arm in arms:
        if arm == baseline:
            continue
        for client in groups_of(study):
            for key in keys_of(study.metrics if metrics is None else metrics):
                one = compare_two(study, arm, baseline, key, client)
                if one is not None:
                    found.append(one)
    return found


def baseline_of(study: Arms) -> str:
    """The arm that the others are held against: the first, unless the study names one."""
    return study.baseline if study.baseline in study.arms else study.arms[0]


def groups_of(study: Arms) -> list[str | None]:
    """Each client where there are several, and all requests together (None)."""
    return [*(study.clients if len(study.clients) > 1 else ()), None]


def value_of(summary: dict[str, Any], key: str, client: str | None = None) -> float:
    """A metric of a summary, NaN where it is not there."""
    group = summary if client is None else summary.get("clients", {}).get(client, {})
    value = group.get(summary_key(key))
    return math.nan if value is None else float(value)


def values_of(study: Arms, arm: str, key: str, client: str | None = None) -> dict[int, float]:
    """A metric of an arm, seed by seed, where it is there."""
    values = {run.seed: value_of(run.summary, key, client) for run in study.of(arm)}
    return {seed: value for seed, value in values.items() if not math.isnan(value)}


def compare_two(
    study: Arms, arm: str, baseline: str, key: str, client: str | None = None
) -> Comparison | None:
    """One arm against any other in one metric; None where they have no seed in common."""
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
    """Under each seed, where there is a ratio under each."""
    if min(ours.min(), theirs.min()) > 0:
        return paired_ratio(ours, theirs)
    return _ratio_of_means(ours, theirs)


def _ratio_of_means(ours: np.ndarray, theirs: np.ndarray) -> Estimate:
    """Where some seeds have nothing to count; its interval holds 5 % only if seeds are alike."""
    if min(ours.min(), theirs.min()) < 0 or not theirs.mean():
        return NO_ESTIMATE
    if not ours.mean():
        return Estimate(0.0, math.nan, math.nan)
    ratio = float(ours.mean() / theirs.mean())
    off = (ours - ratio * theirs) / ours.mean()
    if float(np.abs(off).max()) <= SAME:  # as where all but one seed have nothing to count
        return Estimate(ratio, math.nan, math.nan)
    spread = estimate(list(off))
    half = (spread.high - spread.low) / 2
    return Estimate(ratio, ratio * math.exp(-half), ratio * math.exp(half))
