"""Figure 19 of the PagedAttention paper: swap against recompute, by block size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from experiments.papers.panels import keyed
from experiments.papers.reproduction import ByArm, Reproduction, arm
from experiments.papers.settings import Names, Number
from experiments.studies.block_sizes import require_sizes
from experiments.studies.block_sizes_figure import by_size
from experiments.studies.swap_map import Price, Priced, require_prices
from pagedsim.core import ConfigError
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent
from pagedsim.report.style import looks, new_figure, plain_log_ticks
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LATENCY = "normalized_latency_mean"
RECOMPUTE, SWAP = "recompute", "swap"
SLOWER = 0.2
"""By how much recompute is slower than swap at most, as published."""
COMPARABLE = (16, 64)
"""The range of block sizes at which the two are comparable, as published."""
Whole = Annotated[int, Number(1, whole=True)]
Prices = Mapping[str, Mapping[int, Sequence[Price]]]
"""By bus and length, a price for each block size."""
Latency = Mapping[str, Sequence[float]]
"""By way to preempt, and its bus or variant, a value for each block size."""


@dataclass(frozen=True, kw_only=True)
class Preemptions(Reproduction):
    """Both ways under every block size: the price of one sequence, and whole runs."""

    sizes: Sequence[int]
    slots: Whole
    length: Whole
    """Tokens of the sequence whose price the finding reports."""
    lengths: Sequence[int]
    """Further ones."""
    batch: Sequence[int]
    """Decodes beside which a sequence may be computed again, and the tokens of their contexts."""
    buses: Mapping[str, float]
    """GB/s by name; the first is the hardware's."""
    variants: Names
    """Overrides, for whole runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("sizes", self.sizes, least=2)
        require_sizes("lengths", self.lengths, least=0)
        require_prices(self.batch, self.buses)
        if not set(COMPARABLE) <= set(self.sizes):
            raise ConfigError(f"sizes={list(self.sizes)}: must hold 16 and 64, which it compares")

    @property
    def _ways(self) -> dict[str, list[str]]:
        """Every way to preempt, with its bus or variant, and the overrides that make it."""
        return {
            **{
                arm(SWAP, bus): ["preemption=swap", f"hardware.pcie_gb_s={rate:g}"]
                for bus, rate in self.buses.items()
            },
            RECOMPUTE: ["preemption=recompute"],
            **{
                arm(way, name): [f"preemption={way}", *changes]
                for name, changes in self.variants.items()
                for way in (SWAP, RECOMPUTE)
            },
        }

    def arms(self) -> Mapping[str, Sequence[str]]:
        return {
            _arm(way, size): [
                f"memory.block_size={size}",
                f"memory.blocks={self.slots // size}",
                *changes,
            ]
            for size in self.sizes
            for way, changes in self._ways.items()
        }

    def read_arms(self, runs: ByArm) -> Analysis:
        prices = {
            bus: {
                length: [
                    Priced(runs[_arm(arm(SWAP, bus), size)][0].config)(length, *self.batch)
                    for size in self.sizes
                ]
                for length in sorted({self.length, *self.lengths})
            }
            for bus in self.buses
        }
        latency = {
            way: [
                fmean(run.summary[LATENCY] for run in runs[_arm(way, size)]) for size in self.sizes
            ]
            for way in self._ways
        }
        own = next(iter(prices.values()))[self.length]
        swaps = [arm(SWAP, bus) for bus in self.buses]
        data = {
            "sizes": list(self.sizes),
            "length": self.length,
            "price": {
                **{arm(SWAP, bus): [p.swap for p in of[self.length]] for bus, of in prices.items()},
                "recompute, a step of its own": [p.recompute for p in own],
                "recompute, beside decodes": [p.beside for p in own],
            },
            "normalized_latency": latency,
            "shown": [RECOMPUTE, *swaps],
        }
        caption = (
            f"Left: the time that a preemption of {self.length} tokens takes, there and back. "
            "Right: mean time per token of whole runs."
        )
        drawing = FigureSpec("Swap against recompute", caption, partial(draw, data))
        return Analysis(
            finding=list(self._finding(prices, latency)),
            rows=[*self._price_rows(prices), *self._run_rows(latency)],
            listings=[self._price_listing(prices), self._latencies(latency)],
            notes=[
                "the paper names neither the rate nor the length of the sequence; both are those "
                "of the authors' scripts",
                "swap_space_gib is a choice that leaves room for every victim",
            ],
            data=data,
            drawings={"preemption": drawing},
        )

    # -- sentences, rows, tables -------------------------------------------------------------------

    def _finding(self, prices: Prices, latency: Latency) -> Iterator[str]:
        first, *others = self.buses
        one = prices[first][self.length]
        swap, recompute = latency[arm(SWAP, first)], latency[RECOMPUTE]
        yield (
            f"One sequence of {self.length} tokens, {first}: swapping it out and in takes "
            f"{_ms(one[0].swap)} ms with blocks of {self.sizes[0]} and {_ms(one[-1].swap)} ms with "
            f"blocks of {self.sizes[-1]}; computing it again takes {_ms(one[0].recompute)} ms, or "
            f"{_ms(one[0].beside)} ms beside decodes, whatever the block size."
        )
        yield (
            f"Whole runs, {first}: of the time per token that recompute gives, swap gives "
            f"{swap[0] / recompute[0]:.3g} times with blocks of {self.sizes[0]}, "
            f"{self._span(swap, recompute)} times with 16 to 64 (published: comparable) and "
            f"{swap[-1] / recompute[-1]:.2f} times with {self.sizes[-1]}; recompute is "
            f"{_slower(max(_over(recompute, swap)))} (published: {percent(SLOWER, 0)})."
        )
        for bus in others:
            slower = latency[arm(SWAP, bus)]
            yield (
                f"Over {bus} one sequence takes at most {_most(prices[bus][self.length]):.2f} "
                f"times as long computed again as swapped, over {first} {_most(one):.2f} times "
                f"(published: {1 + SLOWER:g}); in whole runs over {bus} "
                f"recompute is {_slower(max(_over(recompute, slower)))} than swap, and swap is "
                f"{self._span(slower, recompute)} times as slow with 16 to 64."
            )

    def _span(self, swap: Sequence[float], recompute: Sequence[float]) -> str:
        values = [
            one
            for size, one in zip(self.sizes, _over(swap, recompute), strict=True)
            if COMPARABLE[0] <= size <= COMPARABLE[1]
        ]
        return f"{min(values):.2f} to {max(values):.2f}"

    def _price_rows(self, prices: Prices) -> Iterator[Row]:
        for bus, of in prices.items():
            costs = of[self.length]
            most = _most(costs)
            why = self._why(bus, costs) if most > 1 + SLOWER else ""
            what = f"one sequence, {bus}: recompute over swap, at most"
            yield Row(what, most, (0.0, 1 + SLOWER), "×", why)
            cheaper = [s for s, p in zip(self.sizes, costs, strict=True) if p.swap < p.recompute]
            what = f"one sequence, {bus}: smallest block at which swap is cheaper"
            yield Row(what, cheaper[0] if cheaper else math.nan, COMPARABLE, "tokens")
        flat = [p.recompute for p in next(iter(prices.values()))[self.length]]
        yield Row("one sequence: recompute, largest over smallest", max(flat) / min(flat), 1, "×")

    def _run_rows(self, latency: Latency) -> Iterator[Row]:
        recompute = latency[RECOMPUTE]
        for bus in self.buses:
            swap = latency[arm(SWAP, bus)]
            for size in (self.sizes[0], *COMPARABLE, self.sizes[-1]):
                ours = _over(swap, recompute)[self.sizes.index(size)]
                published = 1.0 if COMPARABLE[0] <= size <= COMPARABLE[1] else None
                what = f"whole runs, {bus}: swap over recompute, blocks of {size}"
                yield Row(what, ours, published, "×")
            what = f"whole runs, {bus}: recompute over swap, at most"
            yield Row(what, max(_over(recompute, swap)), (0.0, 1 + SLOWER), "×")

    def _why(self, bus: str, costs: Sequence[Price]) -> str:
        """Where a bound is missed: what would meet it."""
        beside = max(p.beside / p.swap for p in costs)
        # The best block size makes the fewest copies, so nearly all of its time is the bus's.
        least = min(costs, key=lambda p: p.swap)
        meets = self.buses[bus] * (1 + SLOWER) * least.swap / least.recompute
        return (
            f"{beside:.2f} × if computed beside decodes; the paper's bus is not known, and one of "
            f"about {meets:.2g} GB/s would meet it"
        )

    def _price_listing(self, prices: Prices) -> Listing:
        rows = []
        first = next(iter(prices.values()))
        for length, costs in first.items():
            for bus, of in prices.items():
                rows.append([f"{length} tokens: swap, {bus}", *(_ms(p.swap) for p in of[length])])
            rows.append([f"{length} tokens: recompute", *(_ms(p.recompute) for p in costs)])
            rows.append([f"{length}, beside decodes", *(_ms(p.beside) for p in costs)])
        return Listing("Figure 19a: one sequence, ms", ["block size", *map(str, self.sizes)], rows)

    def _latencies(self, latency: Latency) -> Listing:
        rows = [[way, *map(_ms, values)] for way, values in latency.items()]
        title = "Figure 19b: whole runs, ms per token"
        return Listing(title, ["block size", *map(str, self.sizes)], rows)


def _arm(way: str, size: int) -> str:
    """The block size stands between the way and its bus or variant."""
    how, _, name = way.partition(", ")
    return arm(how, f"blocks of {size}", name)


def _most(costs: Sequence[Price]) -> float:
    """The largest ratio of computing again to swapping."""
    return max(p.recompute / p.swap for p in costs)


def _over(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(some, others, strict=True)]


def _slower(ratio: float) -> str:
    return f"at most {percent(ratio - 1, 0)} slower" if ratio > 1 else "never slower"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


def draw(data: Mapping[str, Any]) -> Figure:
    """The price of one sequence, and the time per token of whole runs."""
    sizes, price, latency = data["sizes"], data["price"], data["normalized_latency"]
    look = looks(list(price)) | {RECOMPUTE: looks(list(price))["recompute, a step of its own"]}
    panels = {
        f"One sequence of {data['length']} tokens, there and back (ms)": price,
        "Whole runs: time per token (ms)": {name: latency[name] for name in data["shown"]},
    }
    figure = new_figure(3.4)
    for axes, (title, of) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name, values in of.items():
            line = range(len(sizes)), [1e3 * value for value in values]
            own = look[name]
            axes.plot(*line, color=own.colour, linestyle=own.dashes, marker="o", ms=4)
        axes.set_yscale("log")
        axes.set_title(title)
        plain_log_ticks(axes.yaxis)
        by_size(axes, sizes)
    return keyed(figure, {name: look[name] for name in price}, top=0.68, wspace=0.2)
