"""Figure 18 of the PagedAttention paper: the best block size, and the cost of small blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments.papers.panels import keyed
from experiments.papers.reproduction import ByArm, Reproduction, arm, nested
from experiments.papers.settings import In, Number
from experiments.studies.block_sizes import require_sizes, unused_slots
from experiments.studies.block_sizes_figure import by_size
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.files import RESULT, read_json
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent
from pagedsim.report.style import GRID, MUTED, looks, new_figure, plain_log_ticks
from pagedsim.run.study import Analysis
from pagedsim.sim.cost.roofline import slowdown
from pagedsim.user_error import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCY = "normalized_latency_mean"
ByLoad = Mapping[str, Sequence[float]]
"""By load, a value for each block size."""
Share = Annotated[float, Number(0)]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of one kind; `best`: the range of block sizes that serve them best, as published."""

    workload: str
    rate: Share
    requests: Annotated[int, Number(1, whole=True)]
    best: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Another choice where the paper leaves one open; None: that of the study."""

    overhead: Share | None = None
    load: Share = 1.0
    """A factor of the rates."""
    rates: Annotated[Mapping[str, float], In("loads"), Number(0)] = field(default_factory=dict)
    """Other rates of some loads."""
    overrides: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Blocks(Reproduction):
    """Every block size under every load, as assumed and under each variant."""

    sizes: Sequence[int]
    slots: int
    """Tokens that the memory holds, whatever the block size."""
    overhead: Share
    """How much longer attention takes with blocks of `usual` tokens than in one piece."""
    usual: Annotated[int, Number(1, whole=True)]
    within: Share
    """Sizes that take no more than this share longer are as good as the best."""
    loads: Mapping[str, Load]
    variants: Mapping[str, Variant] = field(default_factory=dict)
    kernel: str | None = None
    """A folder that experiment=block_sizes has left, for kernel times."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("sizes", self.sizes, least=2)
        self._measured()  # errors in the file are reported before anything runs
        for name, load in self.loads.items():
            require_sizes(f"loads.{name}.best", load.best, least=2)
            if not set(load.best) <= set(self.sizes):
                raise ConfigError(f"sizes={list(self.sizes)}: must hold {load.best}, {name}'s best")

    @property
    def _all(self) -> dict[str, Variant]:
        return {"": Variant(), **self.variants}

    def block_tokens(self, variant: Variant) -> float:
        """The cost of finding a block, in tokens read: all of the overhead is ascribed to that."""
        return self.usual * (self.overhead if variant.overhead is None else variant.overhead)

    @property
    def _near(self) -> str:
        return percent(self.within, 0)

    def arms(self) -> Mapping[str, Sequence[str]]:
        return {
            _arm(name, size, variant): [
                f"workload={load.workload}",
                f"workload.rate={own.load * own.rates.get(name, load.rate):g}",
                f"workload.requests={load.requests}",
                f"memory.block_size={size}",
                f"memory.blocks={self.slots // size}",
                f"++cost.block_tokens={self.block_tokens(own):g}",
                f"++cost.fitted_block_size={self.usual}",
                *own.overrides,
            ]
            for variant, own in self._all.items()
            for name, load in self.loads.items()
            for size in self.sizes
        }

    def read_arms(self, runs: ByArm) -> Analysis:

        def means(of: Callable[[Run, int], float], variant: str, load: str) -> list[float]:
            arms = {size: runs[_arm(load, size, variant)] for size in self.sizes}
            return [fmean(of(run, size) for run in own) for size, own in arms.items()]

        latency = nested(
            partial(means, lambda run, size: run.summary[LATENCY]), self._all, self.loads
        )
        waste = nested(partial(means, unused_slots, ""), self.loads)
        data = {
            "sizes": list(self.sizes),
            "normalized_latency": {name or "as assumed": of for name, of in latency.items()},
            "waste_tokens_a_sequence": waste,
            "best": {load: list(one.best) for load, one in self.loads.items()},
        }
        caption = (
            "Mean time per token over block sizes; shaded: where the paper found it best. Thin "
            "lines: other assumptions. Right: slots that a sequence holds and does not use."
        )
        return Analysis(
            finding=list(self._finding(latency, waste)),
            rows=list(self._rows(latency[""], waste)),
            listings=[*self._tables(latency), self._kernels()],
            notes=self._notes(),
            data=data,
            drawings={"blocks": FigureSpec("Block sizes", caption, partial(draw, data))},
        )

    def _good(self, values: Sequence[float], within: float | None = None) -> list[int]:
        """The sizes as good as the best."""
        most = min(values) * (1 + (self.within if within is None else within))
        return [size for size, value in zip(self.sizes, values, strict=True) if value <= most]

    def _best(self, values: Sequence[float]) -> int:
        return self.sizes[int(np.argmin(values))]

    # -- sentences, rows, tables -------------------------------------------------------------------

    def _finding(self, latency: Mapping[str, ByLoad], waste: ByLoad) -> Iterator[str]:
        first, last = self.sizes[0], self.sizes[-1]
        for name, load in self.loads.items():
            values, (low, high) = latency[""][name], load.best
            yield (
                f"{name}: blocks of {self._best(values)} serve best, and "
                f"{_range(self._good(values))} come within {self._near} of it (published: {low} to "
                f"{high}); at {last} a token takes {values[-1] / min(values):.1f} times as long, "
                f"at {first} {values[0] / min(values):.1f} times."
            )
        at = self.sizes.index(self.usual) if self.usual in self.sizes else 0
        wasted = ", ".join(f"{load} {values[at]:.1f}" for load, values in waste.items())
        yield (
            f"Blocks of {self.sizes[at]} leave {wasted} slots a sequence unused, where "
            f"(B - 1) / 2 is {(self.sizes[at] - 1) / 2:g}."
        )
        for name in self.variants:
            each = ", ".join(
                f"{load} {_range(self._good(of))}" for load, of in latency[name].items()
            )
            yield f"With {name} these come within {self._near} of the best: {each}."

    def _rows(self, latency: ByLoad, waste: ByLoad) -> Iterator[Row]:
        for name, load in self.loads.items():
            values, (low, high) = latency[name], load.best
            good = self._good(values)
            yield Row(f"{name}: best block size", self._best(values), (low, high), "tokens")
            yield self._edge(name, "smallest", good[0], low, values)
            yield self._edge(name, "largest", good[-1], high, values)
            for size, value in zip(self.sizes, waste[name], strict=True):
                if size in (self.usual, self.sizes[-1]):
                    short = "sequences are shorter than a block" if value > 0.6 * size else ""
                    what = f"{name}: unused slots a sequence, blocks of {size}"
                    yield Row(what, value, (size - 1) / 2, "", short)

    def _edge(
        self, load: str, which: str, ours: int, published: int, values: Sequence[float]
    ) -> Row:
        """The smallest or largest size that is as good as the best."""
        why = ""
        if ours != published:
            more = values[self.sizes.index(ours)] / min(values) - 1
            why = (
                f"blocks of {ours} take {percent(more, 0)} longer than the best; the paper does "
                "not say what counts as good, and the table below has other bounds"
            )
        return Row(f"{load}: {which} within {self._near}", ours, published, "tokens", why)

    def _tables(self, latency: Mapping[str, ByLoad]) -> Iterator[Listing]:
        every = {arm(load, name): of[load] for load in self.loads for name, of in latency.items()}
        bounds = sorted({self.within, 0.2, 0.5})
        yield Listing(
            "Figure 18b, with other assumptions",
            ["time per token, ms", *map(str, self.sizes)],
            [[what, *(f"{1e3 * one:,.0f}" for one in values)] for what, values in every.items()],
        )
        yield Listing(
            "Which sizes are good, by what counts as good",
            ["as good as the best", *(f"within {percent(bound, 0)}" for bound in bounds)],
            [
                [what, *(_range(self._good(values, bound)) for bound in bounds)]
                for what, values in every.items()
            ],
        )

    def _kernels(self) -> Listing:
        """Figure 18a: assumed, and measured where there was a GPU."""
        mine = self._measured()
        rows = [
            [
                f"assumed, {percent(share, 0)} at {self.usual}",
                *(f"{slowdown(size, share * self.usual):.2f}" for size in self.sizes),
            ]
            for share in sorted({0.2, self.overhead, 0.26})
        ]
        rows.append(
            [
                "measured here",
                *(f"{mine[size]:.2f}" if size in mine else "–" for size in self.sizes),
            ]
        )
        head = ["decode attention, × in one piece", *map(str, self.sizes)]
        return Listing("Figure 18a: what small blocks cost the kernel", head, rows)

    def _measured(self) -> dict[int, float]:
        """Measured times of our kernel by block size, over the shortest."""
        if self.kernel is None:
            return {}
        path = Path(self.kernel) / RESULT
        try:
            times = read_json(path)["data"]["kernel"]["seconds"]
            seconds = {int(size): float(value) for size, value in times.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"study.kernel={self.kernel}: {shown(path)} has no kernel times; it takes what "
                "experiment=block_sizes backend=engine leaves"
            ) from error
        return {size: value / min(seconds.values()) for size, value in seconds.items()}

    def _notes(self) -> list[str]:
        notes = [
            "the paper gives no rates for this figure; the authors' scripts have 2.01/s for "
            "ShareGPT and 30.1/s for Alpaca, and another rate is a choice: 50/s for Alpaca is one "
            "at which as many requests run as in the paper's Figure 13",
            f"that all of the kernel's {percent(self.overhead, 0)} at {self.usual} is for finding "
            "blocks is an assumption, too: the paper measured 20 to 26 % over FasterTransformer's",
        ]
        if self.kernel is None:
            notes.append(
                "no kernel was measured: on a GPU run experiment=block_sizes backend=engine "
                "scale=full, then this with study.kernel= its folder"
            )
        return notes


def _arm(load: str, size: int, variant: str) -> str:
    return arm(load, f"blocks of {size}", variant)


def _range(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 2 else " and ".join(map(str, sizes))


# -- the plot --------------------------------------------------------------------------------------


def draw(data: Mapping[str, Any]) -> Figure:
    """A panel a load with the time per token by block size, and one of unused slots."""
    sizes, latency = data["sizes"], data["normalized_latency"]
    look = looks(list(latency))
    figure = new_figure(3.3)
    panels = figure.subplots(1, len(data["best"]) + 1)
    for axes, (load, (low, high)) in zip(panels, data["best"].items(), strict=False):
        ends = sizes.index(low) - 0.35, sizes.index(high) + 0.35
        axes.axvspan(*ends, color=GRID, alpha=0.55, lw=0)
        for number, (name, of) in enumerate(reversed(latency.items())):
            first = number == len(latency) - 1
            axes.plot(
                range(len(sizes)),
                [1e3 * value for value in of[load]],
                color=look[name].colour,
                linestyle=look[name].dashes,
                lw=2.2 if first else 1.2,
                marker="o" if first else None,
                ms=4,
            )
        axes.set_yscale("log")
        axes.set_title(f"{load}: time per token (ms)")
        plain_log_ticks(axes.yaxis)
        by_size(axes, sizes)
    _draw_waste(panels[-1], sizes, data["waste_tokens_a_sequence"])
    return keyed(figure, look, top=0.68, wspace=0.24)


def _draw_waste(axes: Axes, sizes: Sequence[int], waste: ByLoad) -> None:
    """Unused slots a sequence beside the expected ones."""

    def positive(values: Sequence[float]) -> list[float]:
        return [value if value > 0 else math.nan for value in values]

    places, middle = range(len(sizes)), len(sizes) // 2
    axes.plot(places, positive([(size - 1) / 2 for size in sizes]), color=MUTED, lw=1)
    where = middle, (sizes[middle] - 1) / 2
    axes.annotate("(B − 1) / 2", where, (6, -12), textcoords="offset points", color=MUTED)
    for marker, (load, values) in zip("os^v", waste.items(), strict=False):
        axes.plot(places, positive(values), marker, ms=5, mfc="none", label=load, color=MUTED)
    axes.set_yscale("log")
    axes.set_title("Unused slots a sequence")
    axes.legend(loc="upper left", handletextpad=0.2)
    plain_log_ticks(axes.yaxis)
    by_size(axes, sizes)
