"""Pareto ranking of arms over several metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import label_of, metric_of
from pagedsim.metrics.compare import Comparison, baseline_of, compare_two, estimate, values_of


@dataclass(frozen=True)
class Criterion:
    """A metric with a better direction, of one group of requests."""

    key: str
    group: str | None = None
    """None: all requests together."""

    @property
    def label(self) -> str:
        """Its label."""
        return label_of(self.key) if self.group is None else f"{self.group} {label_of(self.key)}"

    @property
    def way(self) -> int:
        """1 if more is better, -1 if less is."""
        return metric_of(self.key).better


@dataclass(frozen=True)
class Dominated:
    """Dominated: another arm is at least as good by every criterion."""

    by: str
    surely: int
    """Number of criteria by which it is significantly better."""


@dataclass
class Standing:
    """Ranking of arms by `criteria`; groups of requests are the clients of `arms`.

    Latencies are of finished requests. Those of an arm that finished fewer requests than others
    are not comparable, so it has no value for them.
    """

    arms: Arms
    criteria: Sequence[Criterion]
    _found: dict[tuple[str, str, Criterion], Comparison | None] = field(default_factory=dict)
    _means: dict[tuple[str, Criterion], float] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """The baseline arm."""
        return baseline_of(self.arms)

    def mean(self, arm: str, criterion: Criterion) -> float:
        """Mean over the seeds; NaN without a comparable value."""
        key = arm, criterion
        if key not in self._means:
            values = values_of(self.arms, arm, criterion.key, criterion.group).values()
            told = arm not in self.selective or not metric_of(criterion.key).latency
            self._means[key] = estimate(list(values)).mean if told else math.nan
        return self._means[key]

    @cached_property
    def selective(self) -> Mapping[str, int]:
        """Arms that finished fewer requests than others, with the difference."""
        done = {
            arm: sum(run.summary["finished"] for run in self.arms.of(arm)) for arm in self.arms.arms
        }
        most = max(done.values())
        return {arm: most - count for arm, count in done.items() if count < most}

    def compared(self, arm: str, other: str, criterion: Criterion) -> Comparison | None:
        """Paired comparison of two arms; None if one has no value."""
        key = arm, other, criterion
        if key not in self._found:
            there = not any(math.isnan(self.mean(one, criterion)) for one in (arm, other))
            self._found[key] = (
                compare_two(self.arms, arm, other, criterion.key, criterion.group)
                if there
                else None
            )
        return self._found[key]

    def surely_better(self, arm: str, other: str, criterion: Criterion) -> bool:
        """Whether it is significantly better."""
        one = self.compared(arm, other, criterion)
        return one is not None and one.sure and one.gain is True

    def best(self, criterion: Criterion) -> str | None:
        """The arm with the best mean, the first of equals; None if no arm has a value."""
        means = {arm: self.mean(arm, criterion) for arm in self.arms.arms}
        there = [arm for arm, mean in means.items() if not math.isnan(mean)]
        return max(there, key=lambda arm: criterion.way * means[arm], default=None)

    def as_good(self, criterion: Criterion) -> list[str]:
        """Arms that are not significantly worse than the best, in order."""
        best = self.best(criterion)
        if best is None:
            return []
        others = [
            arm
            for arm in self.arms.arms
            if arm != best
            and self.compared(best, arm, criterion) is not None
            and not self.surely_better(best, arm, criterion)
        ]
        return sorted(others, key=lambda arm: -criterion.way * self.mean(arm, criterion))

    def price(self, arm: str) -> Comparison | None:
        """The largest significant deterioration against the baseline; None if there is none."""
        found = [self.compared(arm, self.baseline, one) for one in self.criteria]
        costs = [one for one in found if one is not None and one.sure and one.gain is False]
        return max(costs, key=_strength, default=None)

    def same(self) -> list[str]:
        """Arms that equal the baseline in every criterion."""
        return [
            arm
            for arm in self.arms.arms
            if arm != self.baseline
            and all(
                self.mean(arm, one) == self.mean(self.baseline, one)
                for one in self.criteria
                if not math.isnan(self.mean(self.baseline, one))
            )
        ]

    def frontier(self, first: Criterion, second: Criterion) -> list[str]:
        """The Pareto front over two criteria, in the order of the first."""
        ways = first.way, second.way
        points = {
            arm: (ways[0] * self.mean(arm, first), ways[1] * self.mean(arm, second))
            for arm in self.arms.arms
        }
        return unbeaten({arm: at for arm, at in points.items() if not any(map(math.isnan, at))})

    def beaten(self) -> dict[str, Dominated]:
        """Arms that are nowhere better than another and significantly worse in some criterion."""
        found = {}
        for arm in self.arms.arms:
            every = [Dominated(by, self._surely(by, arm)) for by in self.arms.arms if by != arm]
            best = max(every, key=lambda one: one.surely, default=None)
            if best is not None and best.surely > 0:
                found[arm] = best
        return found

    def _surely(self, by: str, arm: str) -> int:
        """Number of criteria by which it is significantly better; 0 if it is worse by any."""
        for one in self.criteria:
            ours, theirs = one.way * self.mean(by, one), one.way * self.mean(arm, one)
            if not ours >= theirs:  # also for NaN
                return 0
        return sum(self.surely_better(by, arm, one) for one in self.criteria)


def unbeaten(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names of the non-dominated points; more is better."""
    ordered = sorted(points, key=lambda name: points[name], reverse=True)
    kept: list[str] = []
    for name in ordered:
        if not kept or points[name][1] > points[kept[-1]][1] or points[name] == points[kept[-1]]:
            kept.append(name)
    return kept


def _strength(one: Comparison) -> float:
    ratio = one.ratio.mean
    return abs(math.log(ratio)) if ratio > 0 else math.inf
