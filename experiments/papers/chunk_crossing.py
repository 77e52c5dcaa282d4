"""Where the latencies of two budgets cross: small chunks cost more alone, and less under load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.papers.chunk_curve import Curve, Point, at, crossing
from experiments.papers.chunk_drawings import draw_crossing
from experiments.papers.chunk_part import Part, mean, over_seeds, told
from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_number
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.run.job import Arm
from pagedsim.run.objects import require_kinds
from pagedsim.run.runs import Runs
from pagedsim.run.study import Reading

Latencies = Mapping[str, Mapping[str, Mapping[float, Sequence[float]]]]
"""Of each way to arrive, budget and rate, a seed each."""
LATENCY = "e2e_mean"


@dataclass(frozen=True, kw_only=True)
class Crossing(Part):
    """Mean latency over rates, for a small and a large budget."""

    overrides: Sequence[str]
    rates: Sequence[float]
    arrivals: Mapping[str, Sequence[str]]
    """How requests may come, and the overrides for that; the first is assumed."""
    published: Sequence[Mapping[str, Any]]
    """Settings of `Point`, the lowest load first; their rates are tried, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.budgets) != 2:
            raise ConfigError(f"study.crossing.budgets: {len(self.budgets)} of them: must be 2")
        if not self.arrivals:
            raise ConfigError("study.crossing.arrivals: must name at least one")
        if len(self._rates) < 2:
            raise ConfigError("study.crossing.rates: must be at least 2")
        for rate in self._rates:
            require_number("study.crossing.rates", rate, above=0)
        for point in self._published:
            for budget in point.seconds:
                self.require_budget("study.crossing.published", budget)
            for budget in self.budgets:
                if budget not in point.seconds:
                    raise ConfigError(f"study.crossing.published at {point.rate:g}: lacks {budget}")

    @property
    def _published(self) -> list[Point]:
        for given in self.published:
            refuse_settings("a point", given, Point, "study.crossing.published")
        points = [Point(**given) for given in self.published]
        for point in points:
            require_kinds(point, "study.crossing.published")
        return points

    @property
    def _rates(self) -> list[float]:
        return sorted({*self.rates, *(point.rate for point in self._published)})

    @property
    def _assumed(self) -> str:
        return next(iter(self.arrivals))

    def ask(self, runs: Runs) -> list[Arm]:
        return [
            Arm(
                _arm(how, budget, rate),
                [*self.overrides, *changes, *self.budgets[budget], f"workload.rate={rate:g}"],
            )
            for how, changes in self.arrivals.items()
            for budget in self.budgets
            for rate in self._rates
        ]

    def read(self, runs: Runs) -> Reading:
        latencies = {
            how: {
                budget: {
                    rate: over_seeds(runs.of(_arm(how, budget, rate)), LATENCY)
                    for rate in self._rates
                }
                for budget in self.budgets
            }
            for how in self.arrivals
        }
        curves = {
            how: {
                budget: {rate: mean(seeds) for rate, seeds in its.items()}
                for budget, its in each.items()
            }
            for how, each in latencies.items()
        }
        data = {
            "crossing": {
                "curves": {
                    how: {
                        budget: {"rate": list(curve), "latency": list(curve.values())}
                        for budget, curve in each.items()
                    }
                    for how, each in curves.items()
                },
                "published": [
                    {"rate": point.rate, "latency": dict(point.seconds)}
                    for point in self._published
                ],
            }
        }
        return Reading(
            finding=list(self._finding(curves)),
            rows=list(self._rows(runs, curves[self._assumed])),
            listings=[self._listing(latencies)],
            data=data,
            drawings={
                "crossing": Drawing(
                    "Mean latency by the steps' budget",
                    "Lines are ours, hollow points as published.",
                    partial(draw_crossing, data["crossing"]),
                )
            },
            table=[
                {"arrivals": how, "budget": budget, "rate": rate, LATENCY: seconds}
                for how, each in latencies.items()
                for budget, its in each.items()
                for rate, seeds in its.items()
                for seconds in seeds
            ],
        )

    def _rows(self, runs: Runs, curves: Mapping[str, Curve]) -> Iterator[Row]:
        small, large = self.budgets
        points = self._published
        for point in points:
            low = point is points[0]
            load = "low load" if low else f"{point.rate:g}/s"
            for budget in self.budgets:
                why = "" if low else self._why_loaded(curves, budget, point)
                ours = curves[budget][point.rate]
                if low and budget == large:
                    why = self._why_alone(runs, point)
                yield Row(f"{load}: {budget}", ours, point.seconds[budget], "s", why)
            ratios = (
                curves[small][point.rate] / curves[large][point.rate],
                point.seconds[small] / point.seconds[large],
            )
            why = self._why_further(runs, curves, point) if low else self._why_queues(point)
            yield Row(f"{load}: {small} / {large}", *ratios, "×", why)
        if len(points) > 1:
            between = points[0].rate, points[-1].rate
            yield Row("the curves cross at", crossing(curves), between, "/s")

    def _why_alone(self, runs: Runs, low: Point) -> str:
        (run, *_) = runs.of(_arm(self._assumed, list(self.budgets)[1], low.rate))
        mfu = run.summary.get("mfu", math.nan)
        return (
            "ours are step times worked out from a data sheet, of whose FLOP/s they reach "
            f"{100 * mfu:.0f} %, and nothing outside the GPU's steps; theirs are measured"
        )

    def _why_further(self, runs: Runs, curves: Mapping[str, Curve], low: Point) -> str:
        """What each chunk more costs, theirs and ours."""
        small, large = self.budgets
        counts = [self._chunks(runs, budget, low.rate) for budget in (small, large)]
        more = counts[0] - counts[1]
        if more <= 0:
            return ""
        theirs = (low.seconds[small] - low.seconds[large]) / more
        ours = (curves[small][low.rate] - curves[large][low.rate]) / more
        return (
            f"a prompt takes {counts[0]} chunks instead of {counts[1]}, and each further one costs "
            f"{1e3 * theirs:.0f} ms there and {1e3 * ours:.1f} ms here: a step of ours costs the "
            "host's time more, and computes small chunks as fast as large ones"
        )

    def _chunks(self, runs: Runs, budget: str, rate: float) -> int:
        (run, *_) = runs.of(_arm(self._assumed, budget, rate))
        prompt = float(np.mean(run.requests("prompt_tokens")["prompt_tokens"].to_numpy()))
        return math.ceil(prompt / run.config["server"]["max_batched_tokens"])

    def _why_loaded(self, curves: Mapping[str, Curve], budget: str, point: Point) -> str:
        """What ours would be if all took as much longer as one request alone."""
        low, large = self._published[0], list(self.budgets)[1]
        slower = low.seconds[large] / curves[large][low.rate]
        stretched = at(curves[budget], point.rate * slower) * slower
        if math.isnan(stretched):
            return ""
        return (
            f"{stretched:.3g} s if all steps took {slower:.2f} times as long, as one request alone "
            "does there"
        )

    def _why_queues(self, point: Point) -> str:
        """Whether a published rate can be served at the published latency at low load."""
        alone = min(self._published[0].seconds.values())
        load = point.rate * alone
        if load < 1:
            return ""
        return (
            f"at {point.rate:g}/s requests of {alone:g} s are {load:.2f} times what can be served "
            "one after another, so that part of these is not the server's time; which part "
            "decides how long requests queue"
        )

    def _finding(self, curves: Mapping[str, Mapping[str, Curve]]) -> Iterator[str]:
        small, large = self.budgets
        points = self._published
        rates = [point.rate for point in points] or [self._rates[0], self._rates[-1]]
        for how, each in curves.items():
            shares = [each[small][rate] / each[large][rate] for rate in rates]
            times = [f"{s:.3g} times at {rate:g}/s" for s, rate in zip(shares, rates, strict=True)]
            times[0] = times[0].replace(" at ", f" as long as one of {large} at ")
            where = crossing(each)
            cross = (
                "the curves do not cross at the rates that were tried"
                if math.isnan(where)
                else f"the curves cross at {where:.2g}/s"
            )
            yield (f"With {how}, a budget of {small} takes {' and '.join(times)}; {cross}.")
        if points:
            shares = [p.seconds[small] / p.seconds[large] for p in points]
            each_told = (f"{s:.3g} at {p.rate:g}/s" for s, p in zip(shares, points, strict=True))
            yield f"Published: {' and '.join(each_told)}."

    def _listing(self, found: Latencies) -> Listing:
        rows = [
            [f"{how}, {rate:g}/s", *(told(each[budget][rate]) for budget in self.budgets)]
            for how, each in found.items()
            for rate in self._rates
        ]
        return Listing(
            "Mean latency by the steps' budget",
            ["", *self.budgets],
            rows,
            "Means, and between what seeds lie.",
        )


def _arm(how: str, budget: str, rate: float) -> str:
    return f"{how}, {budget}, {rate:g} per s"
