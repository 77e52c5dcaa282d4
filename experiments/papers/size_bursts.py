"""Many requests at once: what orders make of them, as the predictions get worse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from experiments.papers.size_answers import (
    MEASURES,
    Answers,
    Arms,
    against,
    agreement,
    cell,
    in_words,
    over_seeds,
)
from experiments.papers.size_curve import of_server
from experiments.papers.size_pictures import draw_bursts, telling
from pagedsim.core.errors import unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import Estimate
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.run.job import Arm
from pagedsim.run.objects import require_kinds
from pagedsim.run.study import Reading


@dataclass(frozen=True, kw_only=True)
class Burst:
    """A server and its requests, served once under the base and once under each arm."""

    overrides: Sequence[str] = ()
    server: str | None = None
    """As that of a curve."""
    arms: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them."""
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of a measure (mean, P90) seconds a token by arm, the base among them."""

    def __post_init__(self) -> None:
        require_kinds(self)
        for measure in self.published:
            if measure not in MEASURES:
                raise unknown("measure of published", measure, MEASURES)


def burst_name(burst: str, arm: str) -> str:
    """What the runs of an arm are called."""
    return f"{burst}, {arm}"


def arms_of(
    bursts: Mapping[str, Burst],
    base: str,
    order: Sequence[str],
    servers: Mapping[str, Sequence[str]],
) -> Iterator[Arm]:
    """All that is to run."""
    for name, burst in bursts.items():
        for arm, changes in {base: order, **burst.arms}.items():
            parts = of_server(burst.server, servers), burst.overrides, changes
            yield Arm(burst_name(name, arm), [override for part in parts for override in part])


@dataclass(frozen=True)
class Beside:
    """One arm of a burst beside the base."""

    name: str
    burst: Burst
    arm: str
    base: str
    ours: Sequence[Answers]
    theirs: Sequence[Answers]
    tau: float
    """How far predicted and true lengths agree; NaN where nobody predicts."""

    def told(self, measure: str) -> float | None:
        """The published share of the base's latency."""
        printed = self.burst.published.get(measure, {})
        there = self.arm in printed and self.base in printed
        return printed[self.arm] / printed[self.base] if there else None

    @property
    def share(self) -> Estimate:
        """Its mean seconds a token over the base's."""
        return against(self.ours, self.theirs, MEASURES["mean"])

    def rows(self) -> Iterator[Row]:
        """Of each measure that was published, and of the mean."""
        for measure in dict.fromkeys(["mean", *self.burst.published]):
            share = against(self.ours, self.theirs, MEASURES[measure])
            words = [f"ours {in_words(share)}"] if share.known else []
            if not math.isnan(self.tau):
                words.append(f"tau {self.tau:.2f}")
            what = f"{self.name}: {measure} seconds a token, {self.arm} / {self.base}"
            yield Row(what, share.mean, self.told(measure), "×", "; ".join(words))

    def cells(self) -> list[str]:
        """A line of the table."""
        told = self.told("mean")
        shares = [against(self.ours, self.theirs, MEASURES[one]) for one in ("mean", "P90")]
        return [
            self.arm,
            "–" if math.isnan(self.tau) else f"{self.tau:.2f}",
            cell(over_seeds(self.ours, MEASURES["mean"])),
            *map(in_words, shares),
            cell(math.nan if told is None else told),
        ]


def read_bursts(
    bursts: Mapping[str, Burst], base: str, answers: Arms, runs: Mapping[str, Sequence[Run]]
) -> Reading:
    """Rows, a table for each burst, and the picture of what predictions are worth."""
    sides = {
        name: [_beside(name, burst, arm, base, answers, runs) for arm in burst.arms]
        for name, burst in bursts.items()
    }
    data = {"bursts": {name: list(map(_data, every)) for name, every in sides.items()}}
    drawing = Drawing(
        "What a prediction is worth",
        "Mean seconds a token, over the base's, by how far predicted and true lengths agree. "
        "Without an interval: one seed.",
        partial(draw_bursts, data, base),
    )
    return Reading(
        finding=[_sentence(name, base, every) for name, every in sides.items()],
        rows=[
            row
            for name, burst in bursts.items()
            for row in (
                *_steps(name, burst, base, answers),
                *(row for one in sides[name] for row in one.rows()),
            )
        ],
        listings=[_listing(name, base, every) for name, every in sides.items()],
        data=data,
        drawings={"predictions": drawing} if telling(data["bursts"]) else {},
    )


def _sentence(name: str, base: str, sides: Sequence[Beside]) -> str:
    """All arms of a burst, the published share behind ours."""
    each = []
    for one in sides:
        told = one.told("mean")
        printed = "" if told is None else f" (published {cell(told)})"
        each.append(f"{cell(one.share.mean)} with {one.arm}{printed}")
    return f"{name}: of the mean seconds a token of {base} there are left {', '.join(each)}."


def _beside(
    name: str,
    burst: Burst,
    arm: str,
    base: str,
    answers: Arms,
    runs: Mapping[str, Sequence[Run]],
) -> Beside:
    own, theirs = burst_name(name, arm), burst_name(name, base)
    tau = agreement(runs[own][0])
    return Beside(name, burst, arm, base, answers[own], answers[theirs], tau)


def _steps(name: str, burst: Burst, base: str, answers: Arms) -> Iterator[Row]:
    """The base itself: by how much longer its steps took on their machine."""
    told = burst.published.get("mean", {}).get(base)
    if told is not None:
        ours = over_seeds(answers[burst_name(name, base)], MEASURES["mean"])
        yield Row(
            f"{name}: mean seconds a token, {base}",
            ours,
            told,
            "s",
            f"all as {cell(told / ours)} times as long steps would have it; that changes no ratio",
        )


def _listing(name: str, base: str, sides: Sequence[Beside]) -> Listing:
    shares = [f"mean / {base}", f"P90 / {base}", f"published: mean / {base}"]
    return Listing(
        f"{name}: by what is known of the lengths",
        ["", "tau", "mean, s a token", *shares],
        [one.cells() for one in sides],
        "tau: Kendall's correlation of predicted and true lengths. In brackets: 95 % confidence.",
    )


def _data(one: Beside) -> dict[str, float | str | None]:
    share = one.share
    return {
        "arm": one.arm,
        "tau": None if math.isnan(one.tau) else one.tau,
        "share": share.mean,
        "low": share.low if share.known else None,
        "high": share.high if share.known else None,
        "published": one.told("mean"),
    }
