"""Early rejection in an overloaded prefill/decode fleet, compared with Mooncake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from experiments.papers.panels import draw_bars, keyed
from experiments.papers.reproduction import ByArm, Floats, Reproduction, arm, nested, ratio
from experiments.papers.settings import Count, In, Names, Number, Positive
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent
from pagedsim.report.style import looks, new_figure, tidy
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP = 1.0
"""Seconds between two samples of the loads."""
_FAR = 0.05
"""A relative difference that needs an explanation."""


@dataclass(frozen=True, kw_only=True)
class Rejection(Reproduction):
    """Every way to reject requests, in every case."""

    one_server: ClassVar[bool] = False

    ways: Annotated[Names, Count()]
    """The first is the baseline."""
    cases: Names
    """Alternatives where the paper leaves a choice open."""
    shown: Annotated[str, In("cases")]
    """The case that is compared with the published numbers."""
    warm_up: Annotated[float, Number(0)]
    """Seconds whose loads are not counted."""
    span: Positive
    """Seconds after the warm-up that the plot of loads shows."""
    published: Annotated[Mapping[str, int], In("ways")]
    """Rejected requests by way."""
    of: Annotated[int, Number(1, whole=True)]
    """Published requests in all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for way, count in self.published.items():
            require_whole(f"published.{way}", count, 1, self.of)

    @property
    def base(self) -> str:
        """The baseline."""
        return next(iter(self.ways))

    def arms(self) -> dict[str, list[str]]:
        return {
            arm(case, way): [*overrides, *changes]
            for case, overrides in self.cases.items()
            for way, changes in self.ways.items()
        }

    def next_runs(self, runs: Runs) -> list[Arm]:
        pools = runs.config["fleet"]["pools"] or {}
        if not {"prefill", "decode"} <= {pool.get("role") for pool in pools.values()}:
            raise ConfigError(
                f"fleet={runs.command.choices.get('fleet')}: must have prefill and decode apart, "
                "as fleet=prefill_decode has: what is refused between them is asked here"
            )
        return super().next_runs(runs)

    def published_for(self, runs: Runs) -> str:
        return "what was published is of other requests, models or replicas"

    def read_arms(self, runs: ByArm) -> Analysis:
        found = nested(
            lambda case, way: loads(runs[arm(case, way)], self.warm_up, self.span),
            *(self.cases, self.ways),
        )
        shown = found[self.shown]
        data: dict[str, Any] = {
            "refused": nested(lambda case, way: found[case][way].refused, self.cases, self.ways),
            "published": {way: count / self.of for way, count in self.published.items()},
            "load": {way: one.curves for way, one in shown.items()},
        }
        return Analysis(
            finding=list(self._finding(found)),
            rows=list(self._rows(shown)),
            listings=[_listing(found)],
            data=data,
            drawings={
                "load": FigureSpec(
                    "Load over time",
                    f"{self.shown}, under the first seed: above, requests whose prompts wait or "
                    "are computed; below, those that decode.",
                    partial(draw_load, data["load"]),
                ),
                "refused": FigureSpec(
                    "Rejections by assumption",
                    "Share of requests refused, for either objective's sake; dotted: published.",
                    partial(draw_refused, data),
                ),
            },
        )

    def _rows(self, shown: Mapping[str, Loads]) -> Iterator[Row]:
        base = shown[self.base]
        for way in self.published:
            one = shown[way]
            why = (
                f"first tokens take {one.prefill:.1f} s and answers {one.decode:.1f} s; seeds give "
                f"{percent(min(one.by_seed))} to {percent(max(one.by_seed))}"
            )
            yield _row(f"refused {way}", one.refused, self._share(way), why)
        for way in self.published if self.base in self.published else ():
            if way != self.base:
                one, told = shown[way], self._share(way) / self._share(self.base)
                why = (
                    f"requests in prefill swing by {percent(one.queue_swing, 0)} of their mean, "
                    f"{percent(base.queue_swing, 0)} {self.base}; {percent(one.slow, 0)} and "
                    f"{percent(base.slow, 0)} of all are served slower than the objective"
                )
                ours = ratio(one.refused, base.refused)
                yield _row(f"refused {way}, over {self.base}", ours, told, why)

    def _share(self, way: str) -> float:
        return self.published[way] / self.of

    def _finding(self, found: Mapping[str, Mapping[str, Loads]]) -> Iterator[str]:
        shown = found[self.shown]

        def each(share: Callable[[Loads], float], digits: int = 0) -> str:
            return ", ".join(f"{percent(share(one), digits)} {way}" for way, one in shown.items())

        refused = ", ".join(
            f"{percent(one.refused)} {way}"
            + (f" ({percent(self._share(way))})" if way in self.published else "")
            for way, one in shown.items()
        )
        yield f"{self.shown}: of all requests are refused (published): {refused}."
        failed = each(lambda one: one.refused + one.slow, 1)
        yield f"Refused, or served with more time between tokens than the objective, are {failed}."
        yield (
            f"Of all, {percent(shown[self.base].late)} are refused {self.base} for nothing: about "
            "what others can gain, and only while prompts are what is short."
        )
        yield (
            "How far the requests in a stage swing, as the standard deviation over time of their "
            f"mean: those that decode {each(lambda one: one.swing)}; those in prefill "
            f"{each(lambda one: one.queue_swing)}."
        )
        for way in list(self.ways)[1:]:
            fewer = [
                case for case, ways in found.items() if ways[way].refused < ways[self.base].refused
            ]
            where = f"{len(fewer)} of {len(found)} cases"
            where += f" ({'; '.join(fewer)})" if fewer else ""
            yield f"Fewer are refused {way} than {self.base} in {where}."


def _row(what: str, ours: float, told: float, why: str) -> Row:
    return Row(what, ours, told, why="" if abs(ours / told - 1) <= _FAR else why)


def _listing(found: Mapping[str, Mapping[str, Loads]]) -> Listing:
    rows = [
        [
            arm(case, way),
            *(percent(value) for value in (one.refused, one.late, one.slow)),
            f"{one.prefill:.1f} s",
            f"{one.decode:.1f} s",
            *(percent(value, 0) for value in (one.queue_swing, one.swing)),
            f"{one.together:.2f}",
        ]
        for case, each in found.items()
        for way, one in each.items()
    ]
    head = ["", "refused", "late", "slow", "prefill", "decode"]
    head += ["prefill swings", "decode swings", "together"]
    note = (
        "Shares of all requests: refused, refused after their prefill, and served slower than "
        "the objective; mean times of the stages; how far their loads swing, and the "
        "correlation of the two."
    )
    return Listing("Rejections, and the variation of loads", head, rows, note)


# -- the load of both stages -----------------------------------------------------------------------


@dataclass(frozen=True)
class Loads:
    """Rejections and loads of an arm; means over its seeds. Shares are of all requests."""

    refused: float
    late: float
    """Rejected after their prompt had been computed."""
    slow: float
    """Served with more time between tokens than the objective."""
    prefill: float
    """Mean seconds to the end of the prompt, of requests that reached a decode replica."""
    decode: float
    """Mean seconds from there to the end."""
    queue_swing: float
    """Standard deviation over time of the requests in prefill, over their mean."""
    swing: float
    """The same of requests that decode."""
    together: float
    """The correlation of the two over time."""
    by_seed: Sequence[float] = ()
    """`refused` of each seed."""
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The first seed's loads: `seconds`, and requests in `prefill` and `decode`."""


def loads(runs: Sequence[Run], warm_up: float, span: float) -> Loads:
    """Loads of an arm from the warm-up to the last arrival; `span` seconds of them as curves."""
    seeds = [_loads(run, warm_up) for run in runs]
    names = [field.name for field in fields(Loads)]
    means = np.mean([shares for shares, *_ in seeds], axis=0).tolist()
    _, times, *stages = seeds[0]
    drawn = times < warm_up + span
    curves = zip(("seconds", "prefill", "decode"), (times, *stages), strict=True)
    return Loads(
        **dict(zip(names, means, strict=False)),
        by_seed=[shares[0] for shares, *_ in seeds],
        curves={name: load[drawn].tolist() for name, load in curves},
    )


def _loads(run: Run, warm_up: float) -> tuple[list[float], Floats, NDArray[Any], NDArray[Any]]:
    """Of one run: the numbers of `Loads` in their order, and the loads over time."""
    requests = run.by_column()
    arrival, finished = requests["arrival"], requests["finished"]
    left, boarded = requests["left"], requests["boarded"]
    refused = requests.in_state("rejected")
    late = refused & ~np.isnan(requests["first_token"])
    with np.errstate(invalid="ignore", divide="ignore"):
        between = (finished - boarded) / (requests["output_tokens"] - 1)
        slow = ~refused & (between > float(run.config["router"]["tbt"]))
    last = float(arrival.max())
    if last <= warm_up:
        raise ConfigError(
            f"study.warm_up={warm_up:g}: must be shorter than the {last:.0f} s of arrivals"
        )
    times = np.arange(warm_up, last, STEP)
    prefill = _present(arrival, np.where(np.isnan(left), finished, left), times)
    there = ~np.isnan(boarded)
    decode = _present(boarded[there], finished[there], times)
    shares = [float(one.mean()) for one in (refused, late, slow)]
    means = [_known_mean(left - arrival), _known_mean(finished - boarded)]
    swings = [_swing(prefill), _swing(decode), _correlation(prefill, decode)]
    return [*shares, *means, *swings], times, prefill, decode


def _present(begin: Floats, end: Floats, times: Floats) -> NDArray[Any]:
    """The number of requests that have begun and not ended, at each time."""
    begun = np.searchsorted(np.sort(begin), times, side="right")
    return begun - np.searchsorted(np.sort(end), times, side="right")


def _known_mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _swing(load: NDArray[Any]) -> float:
    average = float(load.mean())
    return float(load.std()) / average if average else 0.0


def _correlation(one: NDArray[Any], other: NDArray[Any]) -> float:
    spread = float(one.std() * other.std())
    return float(np.mean((one - one.mean()) * (other - other.mean()))) / spread if spread else 0.0


# -- plots -----------------------------------------------------------------------------------------


def draw_load(data: Mapping[str, Any]) -> Figure:
    """A panel for each stage, a line for each way to reject."""
    figure = new_figure(4.4)
    look = looks(list(data))
    panels = figure.subplots(2, 1, sharex=True)
    for axes, stage in zip(panels, ("prefill", "decode"), strict=True):
        for way, load in data.items():
            axes.plot(load["seconds"], load[stage], color=look[way].colour, ls=look[way].dashes)
        axes.set_ylim(bottom=0)
        axes.set_title(stage)
        tidy(axes, y="requests")
    tidy(panels[-1], x="seconds")
    return keyed(figure, look, hspace=0.25)


def draw_refused(data: Mapping[str, Any]) -> Figure:
    """A group of bars for each case, a bar for each way to reject."""
    figure = new_figure(3.2)
    axes = figure.subplots()
    shares = {
        case: {way: 100 * share for way, share in each.items()}
        for case, each in data["refused"].items()
    }
    colours = draw_bars(axes, shares)
    for way, share in data["published"].items():
        axes.axhline(100 * share, color=colours[way], ls=":", lw=1)
    tidy(axes, y="% refused")
    return keyed(figure, colours)
