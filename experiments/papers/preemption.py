"""Figure 19 of the PagedAttention paper: swap against recompute, by block size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.papers.reproduction import Reproduction
from experiments.studies.block_list import require_sizes
from experiments.studies.swap_prices import Price, Priced, require_prices
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.percent import percent
from pagedsim.report.pictures import Drawing
from pagedsim.report.preemption import draw_preemption
from pagedsim.run.study import Reading

LATENCY = "normalized_latency_mean"
RECOMPUTE, SWAP = "recompute", "swap"
SLOWER = 0.2
"""By so much recompute is slower than swap at most, as published."""
COMPARABLE = (16, 64)
"""From which to which block size the two are comparable, as published."""


@dataclass(frozen=True, kw_only=True)
class Preemptions(Reproduction):
    """Both ways under every block size: the price of one sequence, and whole runs."""

    sizes: Sequence[int]
    slots: int
    length: int
    """Tokens of the sequence whose price the finding tells."""
    lengths: Sequence[int]
    """Of others."""
    batch: Sequence[int]
    """Decodes beside which a sequence may be computed again, and the tokens of their contexts."""
    buses: Mapping[str, float]
    """GB/s by name; the first is the hardware's."""
    variants: Mapping[str, Sequence[str]]
    """Overrides, for whole runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("sizes", self.sizes, least=2)
        require_sizes("lengths", self.lengths, least=0)
        require_whole("length", self.length, 1)
        require_whole("slots", self.slots, 1)
        require_prices(self.batch, self.buses)
        if not set(COMPARABLE) <= set(self.sizes):
            raise ConfigError(f"sizes={list(self.sizes)}: must hold 16 and 64, which it compares")

    def arms(self) -> Mapping[str, Sequence[str]]:
        arms: dict[str, list[str]] = {}
        for size in self.sizes:
            of_size = [f"memory.block_size={size}", f"memory.blocks={self.slots // size}"]
            for bus, rate in self.buses.items():
                arms[_arm(SWAP, size, bus)] = [
                    *of_size,
                    "preemption=swap",
                    f"hardware.pcie_gb_s={rate:g}",
                ]
            arms[_arm(RECOMPUTE, size)] = [*of_size, "preemption=recompute"]
            for name, changes in self.variants.items():
                for way in (RECOMPUTE, SWAP):
                    arms[_arm(way, size, name)] = [*of_size, f"preemption={way}", *changes]
        return arms

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        prices = {
            bus: {
                length: [
                    Priced(runs[_arm(SWAP, size, bus)][0].config)(length, *self.batch)
                    for size in self.sizes
                ]
                for length in sorted({self.length, *self.lengths})
            }
            for bus in self.buses
        }
        latency = {
            (way, name): [_latency(runs[_arm(way, size, name)]) for size in self.sizes]
            for way, name in self._ways()
        }
        first = next(iter(self.buses))
        swap, recompute = latency[SWAP, first], latency[RECOMPUTE, ""]
        data = {
            "sizes": list(self.sizes),
            "length": self.length,
            "price": {
                **{f"swap, {bus}": [p.swap for p in of[self.length]] for bus, of in prices.items()},
                "recompute, a step of its own": [p.recompute for p in prices[first][self.length]],
                "recompute, beside decodes": [p.beside for p in prices[first][self.length]],
            },
            "normalized_latency": {
                f"{way}{name and ', '}{name}": values for (way, name), values in latency.items()
            },
            "shown": [
                "recompute",
                *(f"swap, {bus}" for bus in self.buses),
            ],
        }
        caption = (
            f"Left: the time that a preemption of {self.length} tokens takes, there and back. "
            "Right: mean time per token of whole runs."
        )
        return Reading(
            finding=self._finding(prices, swap, recompute, latency),
            rows=self._rows(prices, recompute, latency),
            listings=[self._prices(prices), self._latencies(latency)],
            notes=[
                "the paper names neither the rate nor the length of the sequence; both are those "
                "of the authors' scripts",
                "swap_space_gib is a choice that leaves room for every victim",
            ],
            data=data,
            drawings={
                "preemption": Drawing(
                    "Swap against recompute", caption, lambda: draw_preemption(data)
                )
            },
        )

    def _ways(self) -> list[tuple[str, str]]:
        """Every way to preempt, and under what."""
        return [
            *((SWAP, bus) for bus in self.buses),
            (RECOMPUTE, ""),
            *((way, name) for name in self.variants for way in (SWAP, RECOMPUTE)),
        ]

    # -- words and tables --------------------------------------------------------------------------

    def _finding(
        self,
        prices: Mapping[str, Mapping[int, Sequence[Price]]],
        swap: Sequence[float],
        recompute: Sequence[float],
        latency: Mapping[tuple[str, str], Sequence[float]],
    ) -> list[str]:
        first, *others = self.buses
        one = prices[first][self.length]
        small, large = one[0].swap, one[-1].swap
        told = [
            f"One sequence of {self.length} tokens, {first}: swapping it out and in takes "
            f"{_ms(small)} with blocks of {self.sizes[0]} and {_ms(large)} with blocks of "
            f"{self.sizes[-1]}; computing it again takes {_ms(one[0].recompute)}, or "
            f"{_ms(one[0].beside)} beside decodes, whatever the block size.",
            f"Whole runs, {first}: of the time per token that recompute gives, swap gives "
            f"{swap[0] / recompute[0]:.3g} times with blocks of {self.sizes[0]}, "
            f"{self._span(swap, recompute)} times with 16 to 64 (published: comparable) and "
            f"{swap[-1] / recompute[-1]:.2f} times with {self.sizes[-1]}; recompute is "
            f"{_slower(max(_over(recompute, swap)))} (published: {percent(SLOWER, 0)}).",
        ]
        for bus in others:
            slower = latency[SWAP, bus]
            told.append(
                f"Over {bus} one sequence takes at most {_most(prices[bus][self.length]):.2f} "
                f"times as long computed again as swapped, over {first} {_most(one):.2f} times "
                f"(published: {1 + SLOWER:g}); in whole runs over {bus} "
                f"recompute is {_slower(max(_over(recompute, slower)))} than swap, and swap is "
                f"{self._span(slower, recompute)} times as slow with 16 to 64."
            )
        return told

    def _span(self, swap: Sequence[float], recompute: Sequence[float]) -> str:
        values = [
            ratio
            for size, ratio in zip(self.sizes, _over(swap, recompute), strict=True)
            if COMPARABLE[0] <= size <= COMPARABLE[1]
        ]
        return f"{min(values):.2f} to {max(values):.2f}"

    def _rows(
        self,
        prices: Mapping[str, Mapping[int, Sequence[Price]]],
        recompute: Sequence[float],
        latency: Mapping[tuple[str, str], Sequence[float]],
    ) -> list[Row]:
        first, *others = self.buses
        rows = []
        for bus, of in prices.items():
            costs = of[self.length]
            ratio, published = _most(costs), (0.0, 1 + SLOWER)
            why = self._why_price(bus, costs) if ratio > 1 + SLOWER else ""
            what = f"one sequence, {bus}: recompute over swap, at most"
            rows.append(Row(what, ratio, published, "×", why))
            cheaper = [s for s, p in zip(self.sizes, costs, strict=True) if p.swap < p.recompute]
            what = f"one sequence, {bus}: smallest block at which swap is cheaper"
            rows.append(Row(what, cheaper[0] if cheaper else math.nan, COMPARABLE, "tokens"))
        flat = [p.recompute for p in prices[first][self.length]]
        rows.append(
            Row("one sequence: recompute, largest over smallest", max(flat) / min(flat), 1, "×")
        )
        for name in (first, *others):
            of_bus = latency[SWAP, name]
            for size in (self.sizes[0], *COMPARABLE, self.sizes[-1]):
                at = self.sizes.index(size)
                within = COMPARABLE[0] <= size <= COMPARABLE[1]
                rows.append(
                    Row(
                        f"whole runs, {name}: swap over recompute, blocks of {size}",
                        of_bus[at] / recompute[at],
                        1.0 if within else None,
                        "×",
                    )
                )
            rows.append(
                Row(
                    f"whole runs, {name}: recompute over swap, at most",
                    max(_over(recompute, of_bus)),
                    (0.0, 1 + SLOWER),
                    "×",
                )
            )
        return rows

    def _why_price(self, bus: str, costs: Sequence[Price]) -> str:
        """Where a bound is missed: what would meet it."""
        beside = max(p.beside / p.swap for p in costs)
        # The best block size makes the fewest copies, so nearly all of its time is the bus's.
        least = min(costs, key=lambda p: p.swap)
        meets = self.buses[bus] * (1 + SLOWER) * least.swap / least.recompute
        return (
            f"{beside:.2f} × if computed beside decodes; the paper's bus is not known, and one of "
            f"about {meets:.2g} GB/s would meet it"
        )

    def _prices(self, prices: Mapping[str, Mapping[int, Sequence[Price]]]) -> Listing:
        rows = []
        for length in next(iter(prices.values())):
            for bus, of in prices.items():
                rows.append(
                    [f"{length} tokens: swap, {bus}", *(_number(p.swap) for p in of[length])]
                )
            costs = next(iter(prices.values()))[length]
            rows.append([f"{length} tokens: recompute", *(_number(p.recompute) for p in costs)])
            rows.append([f"{length}, beside decodes", *(_number(p.beside) for p in costs)])
        return Listing("Figure 19a: one sequence, ms", ["block size", *map(str, self.sizes)], rows)

    def _latencies(self, latency: Mapping[tuple[str, str], Sequence[float]]) -> Listing:
        rows = [
            [f"{way}{name and ', '}{name}", *map(_number, values)]
            for (way, name), values in latency.items()
        ]
        title = "Figure 19b: whole runs, ms per token"
        return Listing(title, ["block size", *map(str, self.sizes)], rows)


def _arm(way: str, size: int, name: str = "") -> str:
    return f"{way}, blocks of {size}{name and ', '}{name}"


def _latency(runs: Sequence[Run]) -> float:
    return fmean(run.summary[LATENCY] for run in runs)


def _most(costs: Sequence[Price]) -> float:
    """How many times as long as swapping computing again takes, where that is most."""
    return max(p.recompute / p.swap for p in costs)


def _over(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(some, others, strict=True)]


def _slower(ratio: float) -> str:
    return f"at most {percent(ratio - 1, 0)} slower" if ratio > 1 else "never slower"


def _number(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"
