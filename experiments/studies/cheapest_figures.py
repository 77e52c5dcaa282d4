"""Result of a search for the cheapest fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedsim.experiments.studies.zoo_pareto import pareto_front, scale_axis, stairs
from pagedsim.metrics.catalogue import label_of, scale_of
from pagedsim.metrics.compare import Estimate
from pagedsim.metrics.result import Listing
from pagedsim.report import style
from pagedsim.report.figures import FigureSpec
from pagedsim.report.labels import Label, Point, place
from pagedsim.report.numbers import percent, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOODPUT = "goodput_per_s"
COLUMNS = (GOODPUT, "tokens_per_euro", "tokens_per_joule", "mean_watts")
"""Metrics of a fleet reported beside its cost."""
_FLOOR = 0.5
"""Smallest SLO attainment in the plot."""


@dataclass(frozen=True)
class Fleet:
    """A fleet that was tried."""

    name: str
    option: str
    gpu: str
    router: str
    long: bool
    """Whether it was run under every seed; otherwise in one short run."""
    counts: tuple[int, ...]
    gpus: int
    euros_per_hour: float
    attained: Estimate
    means: Mapping[str, float]
    overloaded: bool
    """Whether requests came faster than it completed them, in whichever of its pools."""
    unsure: str
    """A note where its runs are too short to show that it keeps up."""


@dataclass(frozen=True)
class Cheapest:
    """All results of the search."""

    attainment: float
    traffic: str
    """The traffic as the beginning of a sentence, such as "10 requests/s take"."""
    objective: str
    fleets: Sequence[Fleet]
    """All tried fleets, in order."""
    least: Mapping[str, str]
    """Name of the cheapest sufficient fleet of each option that has one."""
    dropped: Mapping[str, float]
    """Lower bound of the cost of the other options, in euros per hour."""
    nowhere: Sequence[str]
    """Options that miss the SLO even with the maximum number of replicas."""
    limit: float
    """Cost in euros per hour above which options were dropped."""
    most: int
    interrupted: bool
    prices: Mapping[str, str]
    """The source of the price of each GPU, with vendor and date; empty where it is not known."""

    @property
    def cheapest_fleets(self) -> list[Fleet]:
        """The cheapest sufficient fleet of each option, by cost, then by descending goodput."""
        names = set(self.least.values())
        confirmed = [fleet for fleet in self.fleets if fleet.long and fleet.name in names]
        return sorted(
            confirmed,
            key=lambda fleet: (
                round(fleet.euros_per_hour, 9),
                -fleet.means[GOODPUT],
                -fleet.attained.mean,
            ),
        )

    @property
    def winner(self) -> Fleet | None:
        return next(iter(self.cheapest_fleets), None)

    def lines(self) -> list[str]:
        lines = ["The search was interrupted; this is what is known."] if self.interrupted else []
        if (best := self.winner) is None:
            if self.nowhere and not self.dropped:
                lines.append(
                    f"No fleet has {percent(self.attainment, 0)} of the requests within "
                    f"{self.objective}: even {self.most} replicas of a kind miss it."
                )
            return lines or ["Nothing was searched to the end."]
        if best.unsure:
            lines.append(f"No recommendation yet: {best.unsure}.")
        lines.append(
            f"{self.traffic} {best.name}, {best.gpus} GPU{'s' * (best.gpus > 1)} for "
            f"{best.euros_per_hour:,.2f} € an hour: {_share(best)} of the requests meet "
            f"{self.objective}."
        )
        lines.append(f"The cheapest gives {self._use(best)}.")
        seen = {best.gpu}
        for fleet in self.cheapest_fleets[1:]:
            if fleet.gpu not in seen:
                seen.add(fleet.gpu)
                dearer = signed(fleet.euros_per_hour / best.euros_per_hour - 1, 0)
                lines.append(f"{fleet.name} costs {fleet.euros_per_hour:,.2f} € ({dearer}).")
        if best.attained.known and best.attained.low < self.attainment:
            lines.append(
                f"Whether it has {percent(self.attainment, 0)} within is not sure: more "
                "requests or seeds would tell."
            )
        if self.dropped and not self.interrupted:
            options = len(self.least) + len(self.dropped) + len(self.nowhere)
            lines.append(
                f"{len(self.dropped)} of {options} options were dropped: each would cost "
                f"more than {self.limit:,.2f} € an hour."
            )
        return lines

    @staticmethod
    def _use(fleet: Fleet) -> str:
        phrases = [
            f"{scale_of(name, [value]).text(value)}"
            if name.endswith("watts")
            else f"{value:,.{0 if value >= 1e3 else 1}f} {label_of(name).lower()}"
            for name, value in fleet.means.items()
            if name != GOODPUT and value == value
        ]
        return " and ".join(", ".join(phrases).rsplit(", ", 1))

    # -- for files and pages -----------------------------------------------------------------------

    def listings(self) -> list[Listing]:
        """Tables of the cheapest fleet of each option, and of dropped options."""
        listings = []
        if fleets := self.cheapest_fleets:
            scales = {name: scale_of(name, [f.means[name] for f in fleets]) for name in COLUMNS}
            units = [
                label_of(name) + (f" ({scale.suffix})" if scale.suffix else "")
                for name, scale in scales.items()
            ]
            rows = [
                [
                    fleet.name,
                    str(fleet.gpus),
                    f"{fleet.euros_per_hour:,.2f}",
                    _share(fleet),
                    *(scales[name].number(fleet.means[name]) for name in COLUMNS),
                ]
                for fleet in fleets
            ]
            head = ["the least of an option", "GPUs", "€/h", "within the objective", *units]
            listings.append(Listing("What it takes", head, rows))
        if self.dropped or self.nowhere:
            costs = sorted(self.dropped.items(), key=lambda dropped: dropped[1])
            rows = [[name, f"at least {euros:,.2f} €/h"] for name, euros in costs]
            rows += [[name, f"missed even by {self.most} of a kind"] for name in self.nowhere]
            listings.append(Listing("What was dropped", ["option", "why"], rows))
        return listings

    def data(self) -> dict[str, Any]:
        return {
            "attainment": self.attainment,
            "cheapest": self.winner and self.winner.name,
            "least": {fleet.option: _data(fleet) for fleet in self.cheapest_fleets},
            "dropped": dict(self.dropped),
            "nowhere": list(self.nowhere),
            "limit_euros_per_hour": self.limit,
            "tried": [_data(fleet) for fleet in self.fleets],
            "interrupted": self.interrupted,
        }

    def table(self) -> list[dict[str, object]]:
        return [
            {
                "fleet": fleet.name,
                "runs": "long" if fleet.long else "short",
                "gpus": fleet.gpus,
                "euros_per_hour": fleet.euros_per_hour,
                "slo_attainment": fleet.attained.mean,
                "slo_attainment_low": fleet.attained.low,
                "slo_attainment_high": fleet.attained.high,
                "overloaded": fleet.overloaded,
                **fleet.means,
            }
            for fleet in self.fleets
        ]

    def drawings(self) -> dict[str, FigureSpec]:
        if not self.cheapest_fleets:
            return {}
        known = [f"{gpu} {source}" for gpu, source in self.prices.items() if source]
        prices = f" Prices an hour: {'; '.join(known)}." if known else ""
        caption = (
            "A dot a fleet that was tried, large in long runs and small in a short one; hollow "
            "where it misses the objective (dashed) or is overloaded. On the grey front of long "
            "runs nothing cheaper serves a larger share. Shares below 50 % are left out." + prices
        )
        return {"pareto": FigureSpec("Cost against attainment", caption, partial(draw, self))}


def front_of(fleets: Sequence[Fleet]) -> list[Fleet]:
    """The Pareto front of cost and attainment, by cost; the first of equals."""
    at: dict[Point, Fleet] = {}
    for fleet in fleets:
        at.setdefault((-round(fleet.euros_per_hour, 9), round(fleet.attained.mean, 9)), fleet)
    return [at[point] for point in pareto_front({point: point for point in at})]


def draw(done: Cheapest) -> Figure:
    """SLO attainment over cost, coloured by GPU type."""
    floor = min(_FLOOR, done.attainment)
    shown = [fleet for fleet in done.fleets if fleet.attained.mean >= floor]
    look = style.looks(list(dict.fromkeys(fleet.gpu for fleet in done.fleets)))
    figure = style.new_figure(4.2)
    axes = figure.subplots()
    style.margins(figure, left=0.75)
    style.key(figure, dict(look))
    scale_axis(axes, "x", [fleet.euros_per_hour for fleet in shown])
    lowest = min(fleet.attained.mean for fleet in shown)
    room = 0.12 * (1.0 - min(lowest, 0.9))
    axes.set_ylim(100 * (lowest - room), 100 * (1 + room))
    axes.axhline(100 * done.attainment, color=style.INK, lw=1, ls=(0, (4, 2)))
    front = front_of([fleet for fleet in shown if fleet.long and not fleet.overloaded])
    line = stairs([_point(fleet) for fleet in front])
    axes.plot(*zip(*line, strict=True), color=style.MUTED, lw=1.2, zorder=2)
    for fleet in shown:
        colour = look[fleet.gpu].colour
        met = fleet.attained.mean >= done.attainment and not fleet.overloaded
        size = 6.5 if fleet.long else 3.5
        face = colour if met else style.PAPER
        axes.plot(*_point(fleet), "o", ms=size, mec=colour, mfc=face, zorder=4 if fleet.long else 3)
    # Dots without a name are placed as empty labels, so that names avoid them.
    names = {id(fleet): style.short(fleet.name, 44) for fleet in front}
    ordered = sorted(shown, key=lambda fleet: id(fleet) not in names)
    labels = [Label(names.get(id(fleet), ""), _point(fleet), {"fontsize": 8}) for fleet in ordered]
    place(axes, labels, line)
    style.tidy(axes, x="cost (€ an hour)", y="within the objective (%)")
    return figure


def _point(fleet: Fleet) -> Point:
    return fleet.euros_per_hour, 100 * fleet.attained.mean


def _share(fleet: Fleet) -> str:
    attained = fleet.attained
    low, high = 100 * attained.low, min(100 * attained.high, 100.0)
    return percent(attained.mean) + (f" ({low:.1f} to {high:.1f})" if attained.known else "")


def _data(fleet: Fleet) -> dict[str, Any]:
    return asdict(fleet) | {"attained": fleet.attained._asdict()}
