"""Comparison of arms: effect sizes and confidence intervals.

Comparisons are paired by seed, so variation that all arms share, such as the requests, cancels. A
change is the geometric mean of the seeds' ratios, since a seed's load scales both arms; no heavy
seed dominates. Intervals are Student's t at 95 %: wide with few seeds, none with one.

There is no correction for multiple comparisons: of twenty equal arms, one looks different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pagedsim.core.contracts import is_ours
from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.catalogue import keys_of, label_of, metric_of, scale_of, summary_key, text_of
from pagedsim.metrics.metric import LESS
from pagedsim.metrics.result import added_up
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
    """Compare every other arm with the baseline in `metrics` (default: the study's).

    For several clients, per-client comparisons precede those of all requests.
    """
    arms = study.arms
    if not arms:
        return []
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


FEW = 4
"""Maximum number of arms with a sentence each."""


def finding(study: Arms) -> list[str]:
    """Sentences that answer the study's question, most important first."""
    arms = study.arms
    if not arms:
        return ["No run was completed."]
    if not study.finished:
        why = added_up([run.summary for run in study.runs])
        return [": ".join(["No request finished", *why[:1]]) + "."]
    return [*_turned_away(study), *_answers(study)]


def _turned_away(study: Arms) -> Iterator[str]:
    """That most of the requests are not in any figure, if so."""
    shares = {arm: _rejected(study.of(arm)) for arm in study.arms}
    if most := [f"{_percent(share)} % of {arm}" for arm, share in shares.items() if share > 0.5]:
        yield (
            f"Most requests were rejected ({_join(most)}), and all figures are of the others alone."
        )


def _rejected(runs: Sequence[Run]) -> float:
    """The share of all requests that were rejected."""
    every = sum(run.summary.get("requests", 0) for run in runs)
    return sum(run.summary.get("rejected", 0) for run in runs) / every if every else 0.0


def _answers(study: Arms) -> list[str]:
    arms = study.arms
    if len(arms) == 1:
        return [_alone(study, arms[0])]
    if study.swept or len(arms) > FEW:
        return [*_extremes(study), *sureness(study)]
    comparisons = compare(study)
    others = {arm: [change for change in comparisons if change.arm == arm] for arm in arms}
    del others[baseline_of(study)]
    sentences = [
        sentence(some, study)
        if some
        else f"There is nothing to compare {arm} with {baseline_of(study)} by: no seed has a value "
        f"of {_named(study)} under both."
        for arm, some in others.items()
    ]
    return [*sentences, *sureness(study)]


def sentence(comparisons: Sequence[Comparison], study: Arms) -> str:
    """Gains and costs of one arm against the baseline."""
    arm, baseline = comparisons[0].arm, comparisons[0].baseline
    telling = [change for change in comparisons if _telling(change, study)]
    sure = [change for change in telling if change.sure or not change.difference.known]
    gains, costs = (_strongest([c for c in sure if c.gain is way]) for way in (True, False))
    if not gains and not costs:
        if not telling:
            return f"{arm} and {baseline} do not differ in any metric of this study."
        return (
            f"No difference between {arm} and {baseline} is sure: "
            "every 95 % confidence interval includes zero change."
        )
    clauses = [_join(list(map(in_words, changes))) for changes in (gains, costs) if changes]
    versus = f"Against {baseline}, {arm} {clauses[0]}; "
    if len(clauses) == 2:
        return f"{versus}it {clauses[1]}."
    other = "loses" if gains else "gains"
    if any(change.gain is not bool(gains) for change in telling):
        return f"{versus}nothing that it {other} is sure."
    return f"{versus}it {other} in nothing."


def in_words(comparison: Comparison) -> str:
    """One comparison as a predicate: "cuts the interactive TTFT P99 by 87 % (95 % CI …)"."""
    key, ratio = comparison.key, comparison.ratio
    whose = "" if comparison.client is None else f"{comparison.client} "
    name = f"the {whose}{_in_sentence(key)}"
    theirs, ours = text_of(key, comparison.theirs), text_of(key, comparison.ours)
    values = f"{theirs} to {ours}"
    if comparison.ours == comparison.theirs:
        return f"leaves {name} as it is ({ours})"
    if math.isnan(ratio.mean) or ratio.mean <= 0:
        return f"takes {name} from {values}"
    if ratio.mean >= 2:
        interval = f"; 95 % CI {ratio.low:.1f}–{ratio.high:.1f}" if ratio.known else ""
        return f"raises {name} {ratio.mean:.1f}-fold ({values}{interval})"
    sizes = sorted(abs(bound - 1) for bound in (ratio.low, ratio.high))
    known = ratio.known and comparison.sure
    interval = f"; 95 % CI {'–'.join(map(_percent, sizes))}" if known else ""
    verb = "cuts" if ratio.mean < 1 else "raises"
    return f"{verb} {name} by {_percent(abs(ratio.mean - 1))} % ({values}{interval})"


def _percent(share: float) -> str:
    """Percent, with a decimal below 10 and above 99."""
    whole = 0.1 <= share < 0.99 or share >= 1
    return f"{share * 100:.0f}" if whole else f"{min(share * 100, 99.9 if share < 1 else 1e9):.1f}"


def _telling(change: Comparison, study: Arms) -> bool:
    """Whether to report a comparison: with several clients, latencies per client, else overall.

    A difference of 0.0 % is not reported.
    """
    several = len(groups_of(study)) > 1
    if several and metric_of(change.key).latency == (change.client is None):
        return False
    if change.gain is None:
        return False
    return change.ours == change.theirs or _percent(abs(change.ratio.mean - 1)) != "0.0"


def _strongest(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The largest effect of each group, at most three, in descending order."""
    ranked = sorted(comparisons, key=_strength, reverse=True)
    first: dict[str | None, Comparison] = {}
    for change in ranked:
        first.setdefault(change.client, change)
    return list(first.values())[:3]


def _strength(change: Comparison) -> float:
    ratio = change.ratio.mean
    return abs(math.log(ratio)) if ratio > 0 else math.inf if ratio == 0 else 0.0


def _alone(study: Arms, arm: str) -> str:
    parts = []
    for key in keys_of(study.metrics):
        value = estimate(list(values_of(study, arm, key).values())).mean
        if not math.isnan(value):
            parts.append(f"{_in_sentence(key)} {text_of(key, value)}")
    if not parts:
        return f"{arm}: nothing to tell of these requests by {_named(study)}."
    return f"{arm}: {', '.join(parts)}."


def _named(study: Arms) -> str:
    return ", ".join(map(label_of, keys_of(study.metrics)))


def absent(study: Arms) -> list[str]:
    """The study's metrics, by label, of which no run has a value."""
    keys = keys_of(study.metrics)
    return [label_of(key) for key in keys if not any(values_of(study, a, key) for a in study.arms)]


def _extremes(study: Arms) -> list[str]:
    sentences = []
    for key in keys_of(study.metrics):
        way = metric_of(key).better
        means = {a: estimate(list(values_of(study, a, key).values())).mean for a in study.arms}
        means = {arm: mean for arm, mean in means.items() if not math.isnan(mean)}
        if len(means) < 2 or (key.endswith("_p99") and metric_of(key).latency):
            continue
        if len(set(means.values())) == 1:
            same = text_of(key, next(iter(means.values())))
            sentences.append(f"{label_of(key)}: the same for all ({same}).")
            continue
        scale = scale_of(key, means.values())
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        best, worst = (high, low) if way > 0 else (low, high)
        if scale.text(means[low]) == scale.text(means[high]):
            sentences.append(f"{label_of(key)}: alike for all ({scale.text(means[low])}).")
            continue
        apart = compare_two(study, best, worst, key)
        if apart is not None and apart.difference.known and not apart.sure:
            sentences.append(
                f"{label_of(key)}: no sure difference, not even between {best} "
                f"({scale.text(means[best])}) and {worst} ({scale.text(means[worst])})."
            )
            continue
        words = ("best", "worst") if way else ("lowest", "highest")
        doubt = _doubt(study, key, best, means) if way else ""
        at = f"{study.swept_key} {best}".lstrip()
        sentences.append(
            f"{label_of(key)}: {words[0]} with {at} ({scale.text(means[best])}{doubt}), "
            f"{words[1]} with {worst} ({scale.text(means[worst])})."
        )
    if study.metrics and len(absent(study)) == len(keys_of(study.metrics)):
        return [f"There is nothing to compare by: no run has a value of {_named(study)}."]
    return sentences


def _doubt(study: Arms, key: str, best: str, means: Mapping[str, float]) -> str:
    """The closest arm that is not significantly worse than the best, as a clause; or nothing."""
    others = [arm for arm in means if arm != best]
    for other in sorted(others, key=lambda arm: abs(means[arm] - means[best])):
        change = compare_two(study, best, other, key)
        if change is None or (change.difference.known and not (change.sure and change.gain)):
            return f", not surely better than {other}"
        if means[other] == means[best]:
            return f", as with {other}"
    return ""


def sureness(study: Arms) -> list[str]:
    """A caveat if there is one seed."""
    seeds = {len(study.of(arm)) for arm in study.arms}
    if max(seeds) == 1:
        return ["One seed gives no confidence interval: how sure this is cannot be said."]
    return []


def _in_sentence(key: str) -> str:
    label = label_of(key)
    first = label.split()[0]
    abbreviated = first.isupper() or not first[1:].islower()  # such as TTFT, E2E and QoE
    return label if abbreviated else label[0].lower() + label[1:]


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
