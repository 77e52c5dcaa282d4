"""Who gains and who pays where short answers go first: latency by how long the answer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from experiments.papers.size_answers import (
    Answers,
    Arms,
    Measure,
    against,
    cell,
    in_words,
    over_seeds,
)
from experiments.papers.size_curve import Curve, arm_name
from experiments.papers.size_pictures import draw_payers
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole, unknown
from pagedsim.metrics.compare import Estimate
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.run.objects import require_kinds
from pagedsim.run.study import Reading


@dataclass(frozen=True, kw_only=True)
class Payers:
    """Orders that are held against the base, class by class."""

    of: str
    """A curve, whose runs are read."""
    rates: Sequence[float]
    """Of its rates; an order that lacks one is not told of there."""
    classes: int = 4
    """Into so many equal parts the answers are cut by their length."""
    known: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By order: from and to which share of the base's mean latency it must lie, as is known."""

    def __post_init__(self) -> None:
        require_kinds(self)
        require_whole("classes", self.classes, 2, 20)

    def check(self, curves: Mapping[str, Curve], base: str) -> None:
        """Raise ConfigError for what the curves do not have."""
        if self.of not in curves:
            raise unknown("curve of payers", self.of, curves)
        tried = curves[self.of].rates[base]
        for rate in self.rates:
            if rate not in tried:
                raise ConfigError(
                    f"payers.rates={rate:g}: must be among those of {base} in {self.of}"
                )


def mean_of(answers: Answers) -> float:
    """End to end, in seconds."""
    return float(answers.seconds.mean())


def p99_of(answers: Answers) -> float:
    """The same, of one in a hundred at least."""
    return float(np.percentile(answers.seconds, 99))


def only(classes: int, place: int, measure: Measure) -> Measure:
    """A measure of those whose answers are in one class, the shortest being the first."""

    def measured(answers: Answers) -> float:
        low, high = np.quantile(answers.tokens, [place / classes, (place + 1) / classes])
        within = (answers.tokens <= high) & ((answers.tokens > low) | (place == 0))
        return measure(Answers(answers.seconds[within], answers.tokens[within], answers.span))

    return measured


@dataclass(frozen=True)
class Load:
    """All orders at one rate."""

    rate: float
    runs: Mapping[str, Sequence[Answers]]
    """Of each order."""
    base: str
    classes: int

    def share(self, order: str, measure: Measure) -> Estimate:
        """An order's over the base's."""
        return against(self.runs[order], self.runs[self.base], measure)

    def by_class(self, order: str, measure: Measure = mean_of) -> list[Estimate]:
        """The same of each class."""
        parts = range(self.classes)
        return [self.share(order, only(self.classes, part, measure)) for part in parts]

    @property
    def others(self) -> list[str]:
        """All orders but the base."""
        return [order for order in self.runs if order != self.base]


def read_payers(payers: Payers, curves: Mapping[str, Curve], base: str, arms: Arms) -> Reading:
    """What is known to hold, a table for each rate, and the picture."""
    curve = curves[payers.of]
    loads = [
        Load(
            rate,
            {
                order: arms[arm_name(payers.of, order, rate)]
                for order, rates in curve.rates.items()
                if rate in rates
            },
            base,
            payers.classes,
        )
        for rate in payers.rates
    ]
    data = {"payers": {f"{load.rate:g}": _data(load) for load in loads}, "base": base}
    drawing = Drawing(
        "Who gains and who pays",
        f"Mean latency end to end over that of {base}, by the length of the answer: from the "
        "shortest to the longest of equal parts. Below 1: sooner.",
        partial(draw_payers, data),
    )
    return Reading(
        finding=[_sentence(payers, load, order) for load in loads[-1:] for order in payers.known],
        rows=[row for load in loads for row in _rows(payers, load)],
        listings=[_listing(payers, load) for load in loads],
        data=data,
        drawings={"payers": drawing},
    )


def _rows(payers: Payers, load: Load) -> list[Row]:
    rows = []
    for order, (least, most) in payers.known.items():
        if order not in load.runs:
            continue
        mean, tail = load.share(order, mean_of), load.by_class(order, p99_of)[-1]
        what = f"{payers.of}, {load.rate:g}/s: {order} / {load.base}"
        rows += [
            Row(f"{what}, mean latency", mean.mean, (least, most), "×", f"ours {in_words(mean)}"),
            Row(
                f"{what}, P99 of the longest answers",
                tail.mean,
                None,
                "×",
                f"ours {in_words(tail)}; known to be worse, not by how much",
            ),
        ]
    return rows


def _sentence(payers: Payers, load: Load, order: str) -> str:
    if order not in load.runs:
        return f"{order} was not tried at {load.rate:g} requests/s."
    mean, classes = load.share(order, mean_of), load.by_class(order)
    tail = load.by_class(order, p99_of)[-1]
    return (
        f"On {payers.of} at {load.rate:g} requests/s {order} takes {in_words(mean)} times the mean "
        f"latency of {load.base}: {cell(classes[0].mean)} times for the shortest of "
        f"{load.classes} classes of answers, {cell(classes[-1].mean)} for the longest, whose P99 "
        f"is {in_words(tail)} times as long."
    )


def _listing(payers: Payers, load: Load) -> Listing:
    parts = range(1, load.classes + 1)
    seconds = over_seeds(load.runs[load.base], mean_of)
    return Listing(
        f"{payers.of}, {load.rate:g}/s: latency over that of {load.base}",
        ["", "mean", "P99", *(f"class {part}" for part in parts), "P99 of the longest"],
        [
            [
                order,
                in_words(load.share(order, mean_of)),
                cell(load.share(order, p99_of).mean),
                *(cell(share.mean) for share in load.by_class(order)),
                in_words(load.by_class(order, p99_of)[-1]),
            ]
            for order in load.others
        ],
        f"End to end; {load.base} takes {seconds:.3g} s in the mean. Class 1: the shortest of "
        f"{load.classes} equal parts of the answers. In brackets: 95 % confidence.",
    )


def _data(load: Load) -> dict[str, list[float]]:
    return {order: [share.mean for share in load.by_class(order)] for order in load.others}
