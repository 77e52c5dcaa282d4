"""Live migration of decoding requests between replicas: its effect on the time to first tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from experiments.papers.panels import Panel, draw_panels
from experiments.papers.reproduction import ByArm, Reproduction, arm, averaged, nested, per_s
from experiments.papers.settings import Count, Names, Number
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Served:
    """One system at one rate; means over seeds."""

    ttft_mean: float
    ttft_p99: float
    tpot_p99: float
    preemptions: float
    """Per request."""
    recomputed: float
    """Tokens per request that were computed again after a preemption."""

    @classmethod
    def of(cls, run: Run) -> Served:
        """Of one run."""
        found, count = run.summary, run.summary["requests"]
        each = (found[key] / count for key in ("preemptions", "recomputed_tokens"))
        return cls(found["ttft_mean"], found["ttft_p99"], found["tpot_p99"], *each)


Systems = Mapping[str, Served]


@dataclass(frozen=True, kw_only=True)
class Migration(Reproduction):
    """Systems over the rate, and at one rate with other assumptions."""

    one_server: ClassVar[bool] = False

    systems: Annotated[Names, Count(2)]
    """The last is compared with the others."""
    rates: Annotated[Sequence[float], Number(above=0)]
    """Requests/s."""
    at: float
    """The rate at which assumptions are varied."""
    variants: Names
    """Other assumptions."""
    most: Annotated[float, Number(1)]
    """The largest published factor between the P99 times to the first token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at not in self.rates:
            rates = ", ".join(f"{rate:g}" for rate in self.rates)
            raise ConfigError(f"at={self.at:g}: must be one of study.rates: {rates}")

    def arms(self) -> dict[str, list[str]]:
        points: list[tuple[float, str, Sequence[str]]]
        points = [(rate, per_s(rate), ()) for rate in self.rates]
        points += [(self.at, name, changes) for name, changes in self.variants.items()]
        return {
            arm(name, point): [*own, f"workload.rate={rate:g}", *changes]
            for rate, point, changes in points
            for name, own in self.systems.items()
        }

    def read_arms(self, runs: ByArm) -> Analysis:
        def served(point: str) -> dict[str, Served]:
            return nested(
                lambda name: averaged(map(Served.of, runs[arm(name, point)])), self.systems
            )

        found = {rate: served(per_s(rate)) for rate in self.rates}
        varied = {variant: served(variant) for variant in self.variants}
        data = {
            name: {f"{rate:g}": asdict(found[rate][name]) for rate in self.rates}
            for name in self.systems
        }
        caption = "Left the P99 time to the first token, right preemptions a request."
        title = "First tokens and preemptions over the rate"
        return Analysis(
            finding=list(self._finding(found)),
            rows=list(self._rows(found, varied)),
            listings=[self._listing(found, varied)],
            data={"systems": data},
            drawings={"migration": FigureSpec(title, caption, partial(draw, data))},
        )

    def _gains(self, found: Mapping[float, Systems], other: str) -> dict[float, float]:
        """How many times the last system's P99 another one's is, by rate."""
        return {rate: self._gain(each, other) for rate, each in found.items()}

    def _gain(self, each: Systems, other: str) -> float:
        return each[other].ttft_p99 / each[list(self.systems)[-1]].ttft_p99

    def _rows(self, found: Mapping[float, Systems], varied: Mapping[str, Systems]) -> Iterator[Row]:
        *others, last = self.systems
        for other in others:
            gains = self._gains(found, other)
            parts = [f"{value:.3g} × at {rate:g}/s" for rate, value in gains.items()]
            parts += [
                f"{self._gain(each, other):.3g} × at {self.at:g}/s with {variant}"
                for variant, each in varied.items()
            ]
            what = f"{other} / {last}: P99 to the first token, at most"
            yield Row(what, max(gains.values()), self.most, "×", ", ".join(parts))
        for name, one in found[self.at].items():
            yield Row(f"{name}, {self.at:g}/s: preemptions a request", one.preemptions)
            yield Row(f"{name}, {self.at:g}/s: tokens computed again a request", one.recomputed)

    def _listing(self, found: Mapping[float, Systems], varied: Mapping[str, Systems]) -> Listing:
        every = {f"{rate:g}/s": each for rate, each in found.items()}
        every |= {f"{self.at:g}/s, {variant}": each for variant, each in varied.items()}
        rows = [
            [f"{where}: {name}", *(f"{value:.3g}" for value in asdict(one).values())]
            for where, each in every.items()
            for name, one in each.items()
        ]
        head = ["", "mean TTFT", "P99 TTFT", "P99 TPOT", "preemptions", "computed again"]
        note = "Seconds; preemptions and tokens a request."
        return Listing("Every rate, and other assumptions", head, rows, note)

    def _finding(self, found: Mapping[float, Systems]) -> Iterator[str]:
        *others, last = self.systems
        tails = ", ".join(
            f"{one.ttft_p99:.3g} s with {name}" for name, one in found[self.at].items()
        )
        yield f"At {self.at:g} requests/s the P99 time to the first token is {tails}."
        most = ", ".join(
            f"{max(self._gains(found, other).values()):.3g} times ({other})" for other in others
        )
        yield (
            f"Without {last} it is at most so much longer: {most}; published: up to "
            f"{self.most:g} times."
        )
        lost = ", ".join(
            f"{' and '.join(f'{one.preemptions:.3g}' for one in each.values())} at {rate:g}/s"
            for rate, each in found.items()
        )
        yield f"Preemptions a request with {', '.join(self.systems)}: {lost}."


def draw(data: Mapping[str, Any]) -> Figure:
    """A panel for each measure, a line for each system."""

    def panel(measure: str, label: str, log: bool) -> Panel:
        lines = {
            name: ([float(rate) for rate in its], [one[measure] for one in its.values()])
            for name, its in data.items()
        }
        return Panel(lines=lines, log=log, origin=False, x="requests/s", y=label)

    panels = [
        panel("ttft_p99", "P99 TTFT (s)", log=True),
        panel("preemptions", "preemptions a request", log=False),
    ]
    return draw_panels([panels], 3.6, left=0.8, wspace=0.22)
