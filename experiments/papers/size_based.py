"""Size-based scheduling orders against first come, first served (FastServe, LTR, SRPT)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np

from experiments.papers.curves import gain, sustained
from experiments.papers.panels import Panel, draw_panels, keyed
from experiments.papers.reproduction import (
    ByArm,
    Floats,
    Reproduction,
    arm,
    arrays,
    combined,
    per_s,
)
from experiments.papers.settings import In, Names, Number, Positive
from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import NO_ESTIMATE, Estimate, paired_ratio
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.style import MUTED, looks, new_figure, plain_log_ticks, tidy
from pagedsim.run.backend import RunConfig
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis
from pagedsim.workload.predictor import PREDICTED, kendall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
MEAN = "mean"
SAMPLE = 500
"""Requests by which the agreement of predicted and true lengths is measured."""
CONFIDENCE = "In brackets: 95 % confidence."

# -- settings --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A server and its requests, at several rates."""

    overrides: Sequence[str] = ()
    server: Annotated[str | None, In("servers")] = None
    """One of the study's servers, whose overrides come first; None: that of the configuration."""
    rates: Annotated[Mapping[str, Sequence[float]], In("orders"), Number(above=0)]
    """Requests/s at which each order is run. Orders with the rates of the base are lines."""
    more: Annotated[Names, In("rates")] = field(default_factory=dict)
    """Further overrides of some orders."""
    bound: Positive | None = None
    """Seconds a token that a sustained rate keeps; None: there is none."""
    published: Annotated[
        Mapping[str, Mapping[str, Mapping[float, float]]], In("measures"), Number(above=0)
    ] = field(default_factory=dict)
    """Seconds a token by measure (mean, P95), order and rate."""
    most: Annotated[Mapping[str, float], In("rates")] = field(default_factory=dict)
    """By order: the largest published factor of the base's latency."""
    passes: Annotated[Mapping[str, float], In("rates")] = field(default_factory=dict)
    """By order: a factor whose rate is computed."""

    def told(self, measure: str, order: str) -> dict[float, float]:
        """The published line of an order, by rate."""
        line = self.published.get(measure, {}).get(order, {})
        return {float(rate): line[rate] for rate in sorted(line)}


@dataclass(frozen=True, kw_only=True)
class Burst:
    """A server and its requests, served once under the base and once under each arm."""

    overrides: Sequence[str] = ()
    server: Annotated[str | None, In("servers")] = None
    """As that of a curve."""
    arms: Names
    published: Annotated[Mapping[str, Mapping[str, float]], In("measures")] = field(
        default_factory=dict
    )
    """Seconds a token by measure (mean, P90) and arm, the base among them."""


@dataclass(frozen=True, kw_only=True)
class Payers:
    """Orders that are compared with the base, class by class."""

    of: Annotated[str, In("curves")]
    """The curve whose runs are analysed."""
    rates: Sequence[float]
    """Some of its rates; an order that lacks one is left out there."""
    classes: Annotated[int, Number(2, 20, whole=True)] = 4
    """The number of equal parts into which answers are divided by their length."""
    known: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By order: the range in which its share of the base's mean latency is known to lie."""


@dataclass(frozen=True, kw_only=True)
class SizeBased(Reproduction):
    """Latency of several orders against `base`: under rising load, in bursts, and by class.

    Each curve and each burst is a server with its requests, as its publication has them.
    """

    orders: Names
    base: Annotated[str, In("orders")]
    servers: Names = field(default_factory=dict)
    """Servers of curves and bursts that name one."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    bursts: Mapping[str, Burst] = field(default_factory=dict)
    payers: Payers | None = None
    only: Sequence[str] | None = None
    """The curves and bursts to run; None: all. The payers are analysed if their curve is run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, curve in self.curves.items():
            for order, rates in curve.rates.items():
                if not rates:
                    where = f"curves.{name}.rates.{order}"
                    raise ConfigError(f"{where}=[]: must name at least one rate, in requests/s")
            if self.base not in curve.rates:
                raise ConfigError(f"curves.{name}.rates: lack {self.base}, the base")
        if self.payers is not None:
            for rate in self.payers.rates:
                if rate not in self.curves[self.payers.of].rates[self.base]:
                    where = f"those of {self.base} in {self.payers.of}"
                    raise ConfigError(f"payers.rates={rate:g}: must be among {where}")
        for name in self.only or ():
            if name not in self.curves and name not in self.bursts:
                raise ConfigError(
                    f"only: {unknown('curve or burst', name, (*self.curves, *self.bursts))}"
                )
        if not self.every_arm:
            raise ConfigError("curves and bursts: at least one must be asked for")

    @property
    def measures(self) -> Sequence[str]:
        """The names of what is measured of seconds a token."""
        return list(MEASURES)

    def _wanted(self, named: Mapping[str, T]) -> dict[str, T]:
        """Those that are run."""
        return {name: one for name, one in named.items() if self.only is None or name in self.only}

    @property
    def every_arm(self) -> list[Arm]:
        """All runs."""
        made = []
        for name, curve in self._wanted(self.curves).items():
            for order, rates in curve.rates.items():
                own = [*self._server(curve), *self.orders[order], *curve.more.get(order, ())]
                for rate in rates:
                    made.append(Arm(arm(name, order, per_s(rate)), own, {"workload.rate": rate}))
        for name, burst in self._wanted(self.bursts).items():
            for one, changes in {self.base: self.orders[self.base], **burst.arms}.items():
                made.append(Arm(arm(name, one), [*self._server(burst), *changes]))
        return made

    def _server(self, of: Curve | Burst) -> list[str]:
        return [*(() if of.server is None else self.servers[of.server]), *of.overrides]

    def arms(self) -> dict[str, Sequence[str]]:
        return {arm.name: arm.overrides for arm in self.every_arm}

    def next_runs(self, runs: Runs) -> list[Arm]:
        return self.every_arm

    def key_of(self, arm: str) -> str:
        for part, names in (("curves", self.curves), ("bursts", self.bursts)):
            if whose := [name for name in names if arm.startswith(f"{name}, ")]:
                return f"study.{part}.{max(whose, key=len)}"
        return f"study.{arm}"

    def analyse(self, runs: Runs) -> Analysis:
        reading = super().analyse(runs)
        # The tables report the quality of predictions, arm by arm.
        notes = [note for note in reading.notes if PREDICTED not in note]
        return replace(reading, notes=notes)

    def read_arms(self, runs: ByArm) -> Analysis:
        answers = {arm: [answers_of(run) for run in own] for arm, own in runs.items()}
        curves = self._wanted(self.curves)
        parts = [
            read_bursts(self._wanted(self.bursts), self.base, answers, runs),
            read_curves(curves, self.base, answers),
        ]
        if self.payers is not None and self.payers.of in curves:
            parts.insert(0, read_payers(self.payers, curves[self.payers.of], self.base, answers))
        return combined(parts)


# -- answers ---------------------------------------------------------------------------------------


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
"""By arm, one per seed."""
Measure = Callable[[Answers], float]
MEASURES: Mapping[str, Measure] = {
    MEAN: lambda answers: float(answers.a_token.mean()),
    "P90": lambda answers: float(np.percentile(answers.a_token, 90)),
    "P95": lambda answers: float(np.percentile(answers.a_token, 95)),
}
"""Of the seconds a token, as the publications have them."""


def answers_of(run: Run) -> Answers:
    """Those of a run; raises ConfigError if it finished none."""
    arrival, finished, tokens = (
        column.astype(np.float64)
        for column in arrays(run.requests("arrival", "finished", "output_tokens"))
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
    """Kendall's tau of predicted and true lengths; NaN without predictions, or if all are equal."""
    workload = RunConfig(run.config, run.seed).workload()
    guess = workload.predicted_len[:SAMPLE].astype(np.float64)
    if np.isnan(guess).any():
        return math.nan
    return kendall(workload.output_len[:SAMPLE].astype(np.float64), guess)


def in_words(value: Estimate) -> str:
    """Such as "1.92 (1.80 to 2.05)": the interval of 95 % confidence stands behind."""
    if math.isnan(value.mean):
        return "–"
    interval = f" ({cell(value.low)} to {cell(value.high)})" if value.known else ""
    return f"{cell(value.mean)}{interval}"


def cell(value: float | None) -> str:
    """Three significant digits."""
    return "–" if value is None or math.isnan(value) else f"{value:#.3g}".rstrip(".")


# -- curves ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measured:
    """A curve, and the results of its runs."""

    name: str
    curve: Curve
    base: str
    arms: Arms

    @property
    def others(self) -> list[str]:
        """The orders that are run at all rates of the base."""
        own = set(self.curve.rates[self.base])
        lines = [order for order, rates in self.curve.rates.items() if set(rates) == own]
        return [order for order in lines if order != self.base]

    def of(self, order: str, rate: float) -> Sequence[Answers]:
        """The runs of an order at a rate."""
        return self.arms[arm(self.name, order, per_s(rate))]

    def line(self, order: str, measure: str = MEAN) -> dict[float, float]:
        """Seconds a token by rate, over all seeds."""
        rates = self.curve.rates[order]
        return {rate: over_seeds(self.of(order, rate), MEASURES[measure]) for rate in rates}

    def gains(self, order: str) -> dict[float, Estimate]:
        """The factor of the base's seconds a token, at the rates of both."""
        rates = sorted({*self.curve.rates[order]} & {*self.curve.rates[self.base]})
        return {
            rate: against(self.of(self.base, rate), self.of(order, rate), MEASURES[MEAN])
            for rate in rates
        }

    def told_gains(self, order: str) -> dict[float, float]:
        """The published factors."""
        base, own = self.curve.told(MEAN, self.base), self.curve.told(MEAN, order)
        return {rate: base[rate] / own[rate] for rate in own if rate in base}

    def sustained_ratio(self, order: str, measure: str) -> Estimate:
        """The order's sustained rate over the base's."""
        ours, theirs = ([], [])  # type: tuple[list[float], list[float]]
        for one, rates in ((order, ours), (self.base, theirs)):
            tried = self.curve.rates[one]
            by_rate = [map(MEASURES[measure], self.of(one, rate)) for rate in tried]
            for seed in zip(*by_rate, strict=True):
                curve = dict(zip(tried, seed, strict=True))
                rates.append(sustained(curve, self.curve.bound or math.nan))
        known = not any(map(math.isnan, (*ours, *theirs)))
        return paired_ratio(ours, theirs) if known else NO_ESTIMATE

    @property
    def capacity(self) -> float:
        """Requests/s that the base finishes at the highest rate."""
        runs = self.of(self.base, max(self.curve.rates[self.base]))
        return over_seeds(runs, lambda answers: answers.per_second)

    # -- rows, sentence, table ---------------------------------------------------------------------

    def rates(self) -> Iterator[Row]:
        """Sustained rates, over the base's."""
        curve = self.curve
        if curve.bound is None:
            return
        for order in self.others:
            for measure in dict.fromkeys([MEAN, *curve.published]):
                ours = self.sustained_ratio(order, measure)
                told = {one: curve.told(measure, one) for one in (order, self.base)}
                gained = gain(told, order, self.base, curve.bound)
                printed = None if math.isnan(gained) else gained
                if printed is None and not ours.known:
                    continue
                what = f"{self.name}: rate at {curve.bound:g} s a token ({measure})"
                why = self._why(order, measure, ours)
                yield Row(f"{what}, {order} / {self.base}", ours.mean, printed, "×", why)

    def _why(self, order: str, measure: str, ours: Estimate) -> str:
        """The interval of a ratio of rates, and the difference of the base itself."""
        parts = [f"ours {in_words(ours)}"] if ours.known else []
        told, line = self.curve.told(measure, self.base), self.line(self.base, measure)
        if self.curve.told(measure, order) and (both := sorted(told.keys() & line.keys())):
            ends = " and ".join(
                f"{cell(line[rate])} s here and {cell(told[rate])} s there at {rate:g}/s"
                for rate in (both[0], both[-1])
            )
            parts.append(f"a token of {self.base} takes {ends}")
        return "; ".join(parts)

    def most(self) -> Iterator[Row]:
        """The largest factors of the base's latency."""
        for order in self.others:
            gains = self.gains(order)
            rate = max(gains, key=lambda at: gains[at].mean)
            told = {at: gain for at, gain in self.told_gains(order).items() if at in gains}
            printed: float | tuple[float, float] | None = max(told.values(), default=None)
            why = f"ours at {rate:g}/s: {in_words(gains[rate])}"
            if told:
                why += f"; theirs at {max(told, key=told.__getitem__):g}/s"
            if order in self.curve.most:
                printed = (1.0, self.curve.most[order])  # "up to"
            what = f"{self.name}: seconds a token, {self.base} / {order} where that is most"
            yield Row(what, gains[rate].mean, printed, "×", why)

    def passes(self) -> Iterator[Row]:
        """The rates at which the factors pass those that are asked for."""
        for order, multiple in self.curve.passes.items():
            gains = {rate: gain.mean for rate, gain in self.gains(order).items()}
            rate = sustained(gains, multiple)
            why = f"at most {cell(max(gains.values()))} times" if math.isnan(rate) else ""
            takes = f"{self.base} takes {multiple:g} times as long as {order}"
            yield Row(f"{self.name}: rate at which {takes}", rate, unit="/s", why=why)

    def sentence(self) -> str:
        """The published numbers of a curve, with ours first; empty if there are none."""
        words = []
        for row in (*self.rates(), *self.most()):
            if row.published is not None:
                ours = "more than was tried" if math.isnan(row.ours) else f"{cell(row.ours)} times"
                range_ = isinstance(row.published, tuple)
                told = f"up to {row.published[1]:g}" if range_ else cell(row.published)  # type: ignore[index, arg-type]
                words.append(f"{row.what.partition(': ')[2]}: {ours} (published {told})")
        return f"{self.name}: {'; '.join(words)}." if words else ""

    def listing(self) -> Listing:
        """Rate by rate: the factor of the base's latency, published beside ours."""
        base, told_base = self.base, self.curve.told(MEAN, self.base)
        gains = {order: self.gains(order) for order in self.others}
        told = {order: line for order in self.others if (line := self.told_gains(order))}
        head = ["requests/s", "load", f"{base}, s a token", *(f"{base} / {one}" for one in gains)]
        if told:
            head += ["published: s a token", *(f"published: {base} / {other}" for other in told)]
        rows = []
        for rate, seconds in self.line(base).items():
            row = [f"{rate:g}", cell(rate / self.capacity), cell(seconds)]
            row += [in_words(line[rate]) for line in gains.values()]
            if told:
                row += [cell(line.get(rate)) for line in (told_base, *told.values())]
            rows.append(row)
        note = (
            f"Load: the rate over the {cell(self.capacity)} requests/s that {base} finishes where "
            f"most come. {CONFIDENCE}"
        )
        return Listing(f"{self.name}: mean seconds a token", head, rows, note)

    def data(self) -> dict[str, Any]:
        """For a file, and to draw."""
        lines = {order: self.line(order) for order in (self.base, *self.others)}
        told = {order: self.curve.told(MEAN, order) for order in lines}
        return {
            "bound": self.curve.bound,
            "lines": {order: _points(line) for order, line in lines.items()},
            "published": {order: _points(line) for order, line in told.items() if line},
        }


def _points(line: Mapping[float, float]) -> dict[str, list[float]]:
    return {"rate": list(line), "seconds": list(line.values())}


def read_curves(curves: Mapping[str, Curve], base: str, arms: Arms) -> Analysis:
    """Rows, a table for each curve, and the plot."""
    every = [Measured(name, curve, base, arms) for name, curve in curves.items()]
    data = {"curves": {one.name: one.data() for one in every}, "base": base}
    caption = (
        "Mean seconds a token, from arrival to the last one. Hollow and dotted: as published. The "
        "line across: the bound that a sustained rate keeps."
    )
    drawing = FigureSpec("Latency against rate", caption, partial(draw_curves, data))
    return Analysis(
        finding=[words for one in every if (words := one.sentence())],
        rows=[row for one in every for row in (*one.rates(), *one.most(), *one.passes())],
        listings=[one.listing() for one in every],
        data=data,
        drawings={"load": drawing} if every else {},
    )


def draw_curves(data: Mapping[str, Any]) -> Figure:
    """A panel for each curve, a line for each order."""
    every = data["curves"]
    columns = min(3, len(every))

    panels = [
        Panel(
            lines={name: (its["rate"], its["seconds"]) for name, its in one["lines"].items()},
            more=partial(_dotted, one["published"]),
            bounds=[] if one["bound"] is None else [one["bound"]],
            log=True,
            title=name,
            x="requests/s",
            y=None if number % columns else "seconds a token",
        )
        for number, (name, one) in enumerate(every.items())
    ]
    rows = [panels[begin : begin + columns] for begin in range(0, len(panels), columns)]
    return draw_panels(rows, 0.75 + 2.45 * len(rows), wspace=0.2, hspace=0.45)


def _dotted(published: Mapping[str, Any], axes: Axes, look: Mapping[str, Any]) -> None:
    for order, line in published.items():
        points, own = (line["rate"], line["seconds"]), look[order].colour
        axes.plot(*points, ":", color=own, marker="o", mfc="none", ms=4)


# -- bursts ----------------------------------------------------------------------------------------


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
    """The agreement of predicted and true lengths; NaN without predictions."""

    def told(self, measure: str) -> float | None:
        """The published share of the base's latency."""
        printed = self.burst.published.get(measure, {})
        there = self.arm in printed and self.base in printed
        return printed[self.arm] / printed[self.base] if there else None

    def share(self, measure: str = MEAN) -> Estimate:
        """Its seconds a token over the base's."""
        return against(self.ours, self.theirs, MEASURES[measure])

    def rows(self) -> Iterator[Row]:
        """Of each measure that was published, and of the mean."""
        for measure in dict.fromkeys([MEAN, *self.burst.published]):
            share = self.share(measure)
            words = [f"ours {in_words(share)}"] if share.known else []
            if not math.isnan(self.tau):
                words.append(f"tau {self.tau:.2f}")
            what = f"{self.name}: {measure} seconds a token, {self.arm} / {self.base}"
            yield Row(what, share.mean, self.told(measure), "×", "; ".join(words))

    def cells(self) -> list[str]:
        """A line of the table."""
        tau = "–" if math.isnan(self.tau) else f"{self.tau:.2f}"
        shares = [in_words(self.share(measure)) for measure in (MEAN, "P90")]
        seconds = over_seeds(self.ours, MEASURES[MEAN])
        return [self.arm, tau, cell(seconds), *shares, cell(self.told(MEAN))]

    def words(self) -> str:
        """Its share, and the published one behind it."""
        told = self.told(MEAN)
        printed = "" if told is None else f" (published {cell(told)})"
        return f"{cell(self.share().mean)} with {self.arm}{printed}"

    def data(self) -> dict[str, float | str | None]:
        """For a file, and to draw."""
        share = self.share()
        return {
            "arm": self.arm,
            "tau": None if math.isnan(self.tau) else self.tau,
            "share": share.mean,
            "low": share.low if share.known else None,
            "high": share.high if share.known else None,
            "published": self.told(MEAN),
        }


def read_bursts(bursts: Mapping[str, Burst], base: str, answers: Arms, runs: ByArm) -> Analysis:
    """Rows, a table for each burst, and the plot of the value of predictions."""
    sides = {
        name: [
            Beside(
                *(name, burst, one, base, answers[arm(name, one)], answers[arm(name, base)]),
                tau=agreement(runs[arm(name, one)][0]),
            )
            for one in burst.arms
        ]
        for name, burst in bursts.items()
    }
    data = {"bursts": {name: [one.data() for one in every] for name, every in sides.items()}}
    caption = (
        "Mean seconds a token, over the base's, by how far predicted and true lengths agree. "
        "Without an interval: one seed."
    )
    drawing = FigureSpec("What a prediction is worth", caption, partial(draw_bursts, data, base))
    head = ["", "tau", "mean, s a token"]
    head += [f"mean / {base}", f"P90 / {base}", f"published: mean / {base}"]
    note = f"tau: Kendall's correlation of predicted and true lengths. {CONFIDENCE}"
    rows, finding = list[Row](), list[str]()
    for name, every in sides.items():
        if (told := bursts[name].published.get(MEAN, {}).get(base)) is not None:
            ours = over_seeds(answers[arm(name, base)], MEASURES[MEAN])
            why = f"all as {cell(told / ours)} times as long steps would have it; that changes no"
            what = f"{name}: mean seconds a token, {base}"
            rows.append(Row(what, ours, told, "s", f"{why} ratio"))
        rows += [row for one in every for row in one.rows()]
        each = ", ".join(one.words() for one in every)
        finding.append(f"{name}: of the mean seconds a token of {base} there are left {each}.")
    return Analysis(
        finding=finding,
        rows=rows,
        listings=[
            Listing(
                f"{name}: by what is known of the lengths", head, [o.cells() for o in every], note
            )
            for name, every in sides.items()
        ],
        data=data,
        drawings={"predictions": drawing} if _predicting(data["bursts"]) else {},
    )


def _predicting(bursts: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The arms with predictions of each burst that has at least two of them."""
    known = {name: [arm for arm in arms if arm["tau"] is not None] for name, arms in bursts.items()}
    return {name: arms for name, arms in known.items() if len(arms) > 1}


def draw_bursts(data: Mapping[str, Any], base: str) -> Figure:
    """A panel for each burst: an arm's share of the base's latency by the agreement of orders."""
    from matplotlib.lines import Line2D

    every = _predicting(data["bursts"])
    figure = new_figure(3.7)
    panels = figure.subplots(1, len(every), squeeze=False, sharey=True)[0]
    own, told = (look.colour for look in looks(["ours", "published"]).values())
    for axes, (name, arms) in zip(panels, every.items(), strict=True):
        for one in arms:
            _draw_prediction(axes, one, own, told)
        axes.axhline(1, color=MUTED, lw=0.9)
        axes.set_ylim(0, 1.1)
        axes.set_xlim(0, 1.05)
        axes.set_title(name)
        tidy(axes, x="Kendall's tau of predicted and true lengths")
    tidy(panels[0], y=f"seconds a token, over {base}")
    ours = Line2D([], [], ls="", marker="o", color=own, label="ours")
    theirs = Line2D([], [], ls="", marker="o", color=told, mfc="none", mew=1.5, label="published")
    return keyed(figure, {"ours": ours, "published": theirs}, wspace=0.08)


def _draw_prediction(axes: Axes, arm: Mapping[str, Any], own: str, told: str) -> None:
    """One arm: its share with the interval, and the published one, or else its name."""
    place = arm["tau"]
    if arm["low"] is not None:
        axes.plot([place, place], [arm["low"], arm["high"]], color=own, lw=2)
    axes.plot(place, arm["share"], "o", ms=5, color=own)
    if arm["published"] is not None:
        axes.plot(place, arm["published"], "o", ms=6, color=told, mfc="none", mew=1.5)
        return
    axes.annotate(
        arm["arm"],
        (place, arm["low"] or arm["share"]),
        (0, -6),
        textcoords="offset points",
        rotation=90,
        ha="center",
        va="top",
        color=MUTED,
        fontsize=7.5,
    )


# -- payers: latency by the length of the answer ---------------------------------------------------


def mean_of(answers: Answers) -> float:
    """Mean end-to-end latency, in seconds."""
    return float(answers.seconds.mean())


def p99_of(answers: Answers) -> float:
    """Its 99th percentile."""
    return float(np.percentile(answers.seconds, 99))


def only(classes: int, place: int, measure: Measure) -> Measure:
    """A measure of the answers of one class, the shortest being the first."""

    def measured(answers: Answers) -> float:
        low, high = np.quantile(answers.tokens, [place / classes, (place + 1) / classes])
        within = (answers.tokens <= high) & ((answers.tokens > low) | (place == 0))
        return measure(Answers(answers.seconds[within], answers.tokens[within], answers.span))

    return measured


@dataclass(frozen=True)
class Shares:
    """All orders of a curve at one rate, over the base."""

    payers: Payers
    base: str
    rate: float
    runs: Arms
    """By order."""

    def share(self, order: str, measure: Measure) -> Estimate:
        """An order's over the base's."""
        return against(self.runs[order], self.runs[self.base], measure)

    def by_class(self, order: str, measure: Measure = mean_of) -> list[Estimate]:
        """The same of each class."""
        count = self.payers.classes
        return [self.share(order, only(count, part, measure)) for part in range(count)]

    @property
    def others(self) -> list[str]:
        """All orders but the base."""
        return [order for order in self.runs if order != self.base]

    def rows(self) -> Iterator[Row]:
        """What is known of some orders, beside ours."""
        for order, (least, most) in self.payers.known.items():
            if order not in self.runs:
                continue
            mean, tail = self.share(order, mean_of), self.by_class(order, p99_of)[-1]
            what = f"{self.payers.of}, {self.rate:g}/s: {order} / {self.base}"
            why = f"ours {in_words(mean)}"
            yield Row(f"{what}, mean latency", mean.mean, (least, most), "×", why)
            why = f"ours {in_words(tail)}; known to be worse, not by how much"
            yield Row(f"{what}, P99 of the longest answers", tail.mean, None, "×", why)

    def sentence(self, order: str) -> str:
        """Means and tails of an order."""
        if order not in self.runs:
            return f"{order} was not tried at {self.rate:g} requests/s."
        mean, classes = self.share(order, mean_of), self.by_class(order)
        tail = self.by_class(order, p99_of)[-1]
        return (
            f"On {self.payers.of} at {self.rate:g} requests/s {order} takes {in_words(mean)} times "
            f"the mean latency of {self.base}: {cell(classes[0].mean)} times for the shortest of "
            f"{self.payers.classes} classes of answers, {cell(classes[-1].mean)} for the longest, "
            f"whose P99 is {in_words(tail)} times as long."
        )

    def listing(self) -> Listing:
        """A line for each order."""
        count = self.payers.classes
        seconds = over_seeds(self.runs[self.base], mean_of)
        classes = (f"class {part}" for part in range(1, count + 1))
        rows = [
            [
                order,
                in_words(self.share(order, mean_of)),
                cell(self.share(order, p99_of).mean),
                *(cell(share.mean) for share in self.by_class(order)),
                in_words(self.by_class(order, p99_of)[-1]),
            ]
            for order in self.others
        ]
        note = (
            f"End to end; {self.base} takes {seconds:.3g} s in the mean. Class 1: the shortest of "
            f"{count} equal parts of the answers. {CONFIDENCE}"
        )
        title = f"{self.payers.of}, {self.rate:g}/s: latency over that of {self.base}"
        return Listing(title, ["", "mean", "P99", *classes, "P99 of the longest"], rows, note)


def read_payers(payers: Payers, curve: Curve, base: str, arms: Arms) -> Analysis:
    """The shares of all orders at each rate, and the plot."""
    every = []
    for rate in payers.rates:
        orders = [order for order, rates in curve.rates.items() if rate in rates]
        runs = {order: arms[arm(payers.of, order, per_s(rate))] for order in orders}
        every.append(Shares(payers, base, rate, runs))
    data = {
        "payers": {
            f"{at.rate:g}": {
                order: [share.mean for share in at.by_class(order)] for order in at.others
            }
            for at in every
        },
        "base": base,
    }
    caption = (
        f"Mean latency end to end over that of {base}, by the length of the answer: from the "
        "shortest to the longest of equal parts. Below 1: sooner."
    )
    drawing = FigureSpec("Latency by the length of the answer", caption, partial(draw_payers, data))
    return Analysis(
        finding=[at.sentence(order) for at in every[-1:] for order in payers.known],
        rows=[row for at in every for row in at.rows()],
        listings=[at.listing() for at in every],
        data=data,
        drawings={"payers": drawing},
    )


def draw_payers(data: Mapping[str, Any]) -> Figure:
    """A panel for each rate: every order's latency over the base's, a dot for each class."""
    every = data["payers"]
    orders = list(dict.fromkeys(order for rate in every.values() for order in rate))[::-1]
    figure = new_figure(1.1 + 0.27 * len(orders))
    panels = figure.subplots(1, len(every), squeeze=False, sharex=True, sharey=True)[0]
    shares = next(iter(next(iter(every.values())).values()))
    look = looks([f"class {part}" for part in range(1, len(shares) + 1)], ordered=True)
    for axes, (rate, own) in zip(panels, every.items(), strict=True):
        for order, shares in own.items():
            place = orders.index(order)
            axes.plot([min(shares), max(shares)], [place, place], color=MUTED, lw=0.8)
            for share, dot in zip(shares, look.values(), strict=True):
                axes.plot(share, place, "o", ms=6, color=dot.colour)
        axes.axvline(1, color=MUTED, lw=0.9)
        axes.set_xscale("log")
        plain_log_ticks(axes.xaxis)
        axes.set_title(f"{rate} requests/s")
        tidy(axes, x=f"mean latency over {data['base']}")
    panels[0].set_yticks(range(len(orders)), orders)
    return keyed(figure, {name: one.colour for name, one in look.items()}, left=1.75, wspace=0.08)
