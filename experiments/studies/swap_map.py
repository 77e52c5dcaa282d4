"""Swap or recompute: the price of a preemption over models, buses, layouts and block sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pagedsim.core import ConfigError
from pagedsim.experiments.papers.reproduction import Reproduction
from pagedsim.experiments.studies.block_sizes import require_sizes
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import Estimate, average, paired_ratio
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import number, signed
from pagedsim.report.style import MUTED, key, margins, new_figure
from pagedsim.run.study import Analysis
from pagedsim.server import ServerSpec
from pagedsim.sim.cost import CostModel
from pagedsim.sim.cost.base import step
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.spec.check import Count, In, Number
from pagedsim.spec.objects import make

if TYPE_CHECKING:
    from matplotlib.figure import Figure


THROUGHPUT = "output_tokens_per_s"
SLOWER = 0.2
"""By so much recompute is slower than swap at most, as published for OPT-13B on an A100."""
COPIES: Mapping[str, str] = {"layer": "a copy a layer", "block": "a copy a block"}
WAYS: Mapping[str, Sequence[str]] = {
    "recompute": ["preemption=recompute"],
    "swap, a copy a layer": ["preemption=swap", "memory.kv_layout=layer"],
    "swap, a copy a block": ["preemption=swap", "memory.kv_layout=block"],
    "cheapest, a copy a layer": ["preemption=cheapest", "memory.kv_layout=layer"],
    "cheapest, a copy a block": ["preemption=cheapest", "memory.kv_layout=block"],
}


class Place(NamedTuple):
    """A line of the map."""

    model: str
    machine: str
    bus: str
    layout: str


@dataclass(frozen=True, kw_only=True)
class SwapMap(Reproduction):
    """Prices over the whole grid, and whole runs where memory runs out."""

    models: Sequence[str]
    """The first is the paper's."""
    modern: Annotated[str, In("models")]
    """The model that the finding compares with the paper's."""
    machines: Mapping[str, Sequence[str]]
    buses: Annotated[Mapping[str, float], Number(1e-3), Count()]
    own: Mapping[str, str]
    """The bus that each machine has."""
    sizes: Sequence[int]
    usual: int
    """The block size that findings are of."""
    length: Annotated[int, Number(1)]
    """Tokens of the sequence whose price the map shows."""
    batch: Annotated[Sequence[int], Number(1)]
    """Decodes in the step of a recompute, and the sum of their contexts."""
    batchings: Mapping[str, Sequence[str]]
    """Overrides of whole runs by name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("sizes", self.sizes)
        if len(self.batch) != 2:
            what = "must be two numbers: decodes, and their tokens"
            raise ConfigError(f"batch={list(self.batch)}: {what}")
        if self.usual not in self.sizes:
            raise ConfigError(f"usual={self.usual}: must be one of sizes={list(self.sizes)}")
        for machine in self.machines:
            if self.own.get(machine) not in self.buses:
                raise ConfigError(f"own={dict(self.own)}: must name one of buses for {machine}")

    def arms(self) -> Mapping[str, Sequence[str]]:
        return {
            f"{model}, {machine}, {batching}: {way}": [
                *(f"model={model}", *self.machines[machine], *self.batchings[batching], *changes)
            ]
            for model, machine, batching in product(self.models, self.machines, self.batchings)
            for way, changes in WAYS.items()
        }

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Analysis:
        grid = dict(self._grid(runs))
        effects = {
            (model, machine, batching): _effects(runs, f"{model}, {machine}, {batching}: ")
            for model, machine, batching in product(self.models, self.machines, self.batchings)
        }
        data = {
            "sizes": list(self.sizes),
            "length": self.length,
            "prices": [
                {
                    **place._asdict(),
                    "swap": [price.swap for price in prices],
                    "recompute": prices[0].recompute,
                    "beside": prices[0].beside,
                }
                for place, prices in grid.items()
            ],
            "throughput_over_recompute": {
                ", ".join(where): {way: list(ratio) for way, ratio in of.items()}
                for where, of in effects.items()
            },
        }
        caption = (
            f"The price of preempting one sequence of {self.length} tokens and bringing it back: "
            "computed again in a step of its own, against out and in over the bus, with a copy a "
            "block or a copy a layer. Blue: swap is cheaper, by so many times or more."
        )
        whole = Listing(
            "Whole runs: output tokens/s under recompute, and by how many % others change it "
            "(95 % confidence)",
            ["", "recompute", "swap, layer", "swap, block", "cheapest, layer", "cheapest, block"],
            [
                [
                    ", ".join(where),
                    _per_second(runs[f"{', '.join(where)}: recompute"]),
                    *(_sure(of[way]) for way in list(WAYS)[1:]),
                ]
                for where, of in effects.items()
            ],
        )
        return Analysis(
            finding=list(self._finding(grid, effects)),
            rows=self._rows(grid),
            listings=[self._prices(grid), whole],
            notes=[
                "the picture and result.json have all machines, buses and block sizes",
                "cheapest weighs a recompute in a step of its own; under unified it shares one, so "
                "cheapest swaps more than it should",
                "the published bound is of OPT-13B on an A100, whose bus the paper does not name; "
                "it stands beside other models to show for which it would hold",
                "a fixed time of hardware.pcie_copy_us for each copy is a choice: it decides where "
                "there is a copy a layer",
            ],
            data=data,
            drawings={"map": FigureSpec("Which is cheaper where", caption, lambda: draw_map(data))},
        )

    def _grid(self, runs: Mapping[str, Sequence[Run]]) -> Iterator[tuple[Place, list[Price]]]:
        batching = next(iter(self.batchings))
        for model, machine, bus in product(self.models, self.machines, self.buses):
            config = runs[f"{model}, {machine}, {batching}: recompute"][0].config
            for layout in COPIES:
                settings: dict[str, Any] = {"layout": layout, "pcie_gb_s": self.buses[bus]}
                prices = [
                    price_of(config, self.length, *self.batch, block_size=size, **settings)
                    for size in self.sizes
                ]
                yield Place(model, machine, bus, layout), prices

    def _at(self, prices: Sequence[Price]) -> Price:
        return prices[list(self.sizes).index(self.usual)]

    def _finding(
        self,
        grid: Mapping[Place, Sequence[Price]],
        effects: Mapping[tuple[str, str, str], Mapping[str, Estimate]],
    ) -> Iterator[str]:
        # The paper's model and layout, on the first machine over every bus.
        places = [Place(self.models[0], next(iter(self.machines)), b, "layer") for b in self.buses]
        prices = [self._at(grid[place]) for place in places]
        yield (
            f"The paper's case ({places[0].model}, {places[0].machine}, {COPIES['layer']}, blocks "
            f"of {self.usual}): {self.length} tokens take {_ms(prices[0].recompute)} to compute "
            f"again, and out and in {_each([_ms(price.swap) for price in prices], self.buses)}; "
            "recompute is at most "
            f"{_each([f'{_most(grid[place]):.2f}' for place in places], self.buses)} times as slow "
            f"(published: {1 + SLOWER:g}, over a bus that is not named)."
        )
        # The modern model on the last machine.
        after = list(self.machines)[-1]
        block = Place(self.modern, after, self.own[after], "block")
        now, split = (
            self._at(grid[block._replace(layout=layout)]) for layout in ("block", "layer")
        )
        least, most = sorted((now.recompute, now.swap))
        better, other = (
            "swap" if price.swap < price.recompute else "recompute" for price in (now, split)
        )
        yield (
            f"{_of(block)}: {_ms(now.swap)} against {_ms(now.recompute)}, so {better} is "
            f"{most / least:.1f} times cheaper; with a copy a layer a swap takes "
            f"{_ms(split.swap)}, {split.swap / now.swap:.1f} times as long, and {other} is cheaper"
            f"{': the layout decides' if better != other else ''}."
        )
        won = {
            layout: sum(
                price.swap < price.recompute
                for place, prices in grid.items()
                if place.layout == layout
                for price in prices
            )
            for layout in COPIES
        }
        cases = len(grid) // len(COPIES) * len(self.sizes)
        yield (
            f"With a copy a block swap is cheaper in {won['block']} of {cases} cases of the map, "
            f"with a copy a layer in {won['layer']}."
        )
        said = []
        for batching in self.batchings:
            of = {w: e["swap, a copy a block"] for w, e in effects.items() if w[2] == batching}
            wins = sum(ratio.known and ratio.low > 1 for ratio in of.values())
            loses = sum(ratio.known and ratio.high < 1 for ratio in of.values())
            means = [ratio.mean for ratio in of.values()]
            said.append(
                f"under {batching} it serves {signed(min(means) - 1)} to {signed(max(means) - 1)} "
                f"tokens (surely more in {wins} of {len(of)} cases, surely fewer in {loses})"
            )
        yield (
            "Whole runs that preempt all the time show what is left: against recompute, swap "
            f"with a copy a block: {'; '.join(said)}."
        )

    def _rows(self, grid: Mapping[Place, Sequence[Price]]) -> list[Row]:
        """How far recompute is behind at most: in the paper's case, and on today's machine."""
        rows = []
        before, after = next(iter(self.machines)), list(self.machines)[-1]
        most = self.buses[self.own[before]]
        for place, prices in grid.items():
            theirs = (place.model, place.machine, place.layout) == (self.models[0], before, "layer")
            theirs = theirs and self.buses[place.bus] <= most  # their bus is not known
            if theirs or (place.machine, place.bus) == (after, self.own[after]):
                what = f"{_of(place)}: recompute over swap, at most"
                rows.append(Row(what, _most(prices), (0.0, 1 + SLOWER), "×"))
        return rows

    def _prices(self, grid: Mapping[Place, Sequence[Price]]) -> Listing:
        rows = []
        for place, prices in grid.items():
            if place.bus != self.own[place.machine]:
                continue
            at = self._at(prices)
            rows.append(
                [
                    f"{place.model}, {place.machine}, {place.layout}",
                    *(_ms(price, "") for price in at),
                    self._from(prices, [p.recompute for p in prices]),
                    self._from(prices, [p.beside for p in prices]),
                ]
            )
        head = ["", "swap, ms", "recompute", "beside", "swap wins", "beside"]
        title = (
            f"One sequence of {self.length} tokens, blocks of {self.usual}, a copy a layer or a "
            "block, over the machine's own bus; the block sizes with which swap wins; beside: "
            "computed again in steps that decode anyway"
        )
        return Listing(title, head, rows)

    def _from(self, prices: Sequence[Price], others: Sequence[float]) -> str:
        """With which block sizes swap is cheaper."""
        pairs = zip(self.sizes, prices, others, strict=True)
        won = [size for size, price, other in pairs if price.swap < other]
        if not won or len(won) == len(self.sizes):
            return "always" if won else "never"
        return f"{won[0]} to {won[-1]}" if len(won) > 1 else f"{won[0]}"


def _effects(runs: Mapping[str, Sequence[Run]], where: str) -> dict[str, Estimate]:
    """Throughput of each way relative to recompute: geometric mean of the seeds' ratios."""
    rates = {way: [run.summary[THROUGHPUT] for run in runs[where + way]] for way in WAYS}
    return {way: paired_ratio(values, rates["recompute"]) for way, values in rates.items()}


def _most(prices: Sequence[Price]) -> float:
    return max(price.recompute / price.swap for price in prices)


def _each(values: Sequence[str], buses: Iterable[str]) -> str:
    return ", ".join(f"{value} ({bus})" for value, bus in zip(values, buses, strict=True))


def _of(place: Place) -> str:
    return f"{place.model}, {place.machine}, {place.bus}, {COPIES[place.layout]}"


def _per_second(runs: Sequence[Run]) -> str:
    return f"{average([run.summary[THROUGHPUT] for run in runs]).mean:,.0f}"


def _sure(ratio: Estimate) -> str:
    mean, low, high = (signed(value - 1, unit="") for value in ratio)
    return f"{mean} ({low}…{high})" if ratio.known else mean


def _ms(seconds: float, unit: str = " ms") -> str:
    return number(1e3 * seconds) + unit


class Price(NamedTuple):
    """Prices of one sequence in seconds."""

    swap: float
    recompute: float
    """Recompute in a step of its own."""
    beside: float
    """Recomputation added to a step of decodes."""


def price_of(
    config: Mapping[str, Any],
    tokens: int,
    decodes: int = 1,
    context: int = 0,
    *,
    block_size: int | None = None,
    layout: str | None = None,
    pcie_gb_s: float | None = None,
) -> Price:
    """The price of `tokens`, beside a number of decodes with a total context.

    Nothing is run. Block size, layout and bus may differ from the configuration.
    """
    memory = config["memory"]
    server = ServerSpec(
        block_size=block_size or memory["block_size"],
        kv_layout=layout or memory["kv_layout"],
        kv_cache_dtype=config["kv_cache_dtype"],
        tensor_parallel=config["tensor_parallel"],
    )
    hardware = make("hardware", config["hardware"], Hardware)
    if pcie_gb_s is not None:
        hardware = replace(hardware, pcie_gb_s=pcie_gb_s)
    replica = Replica.of(server, make("model", config["model"], ModelShape), hardware)
    cost = make("cost", config["cost"], CostModel, replica=replica)
    beside = cost.step_seconds(step(tokens, decodes, context))
    return Price(
        cost.prices().swap_seconds(-(-tokens // replica.block_size)),
        cost.recompute_seconds(tokens),
        beside - cost.decode_seconds(decodes, context),
    )


# -- figure ----------------------------------------------------------------------------------------

LEVELS = (0.25, 0.5, 1 / 1.2, 1.2, 2.0, 4.0)
"""Colour boundaries of the ratio of recomputation to swap time."""
COLOURS = ("#b34700", "#e08a3c", "#f3c79a", "#d0d7de", "#9ccbec", "#3d96d1", "#004f86")
MEANINGS = ("recompute 4 ×", "2 ×", "1.2 ×", "even", "1.2 ×", "2 ×", "swap 4 ×")


def draw_map(data: Mapping[str, Any]) -> Figure:
    """A panel per machine and bus, a row per model and layout, a column per block size."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    prices, sizes = data["prices"], data["sizes"]
    machines = list(dict.fromkeys(price["machine"] for price in prices))
    buses = list(dict.fromkeys(price["bus"] for price in prices))
    lines = sorted(
        dict.fromkeys((p["layout"], p["model"]) for p in prices), key=lambda line: line[0]
    )
    figure = new_figure(0.9 + (0.2 * len(lines) + 0.5) * len(machines))
    panels = figure.subplots(len(machines), len(buses), squeeze=False)
    norm = BoundaryNorm([0.0, *LEVELS, 1e9], len(COLOURS))
    blocks = sum(layout == "block" for layout, _ in lines)
    for axes, (machine, bus) in zip(panels.flat, product(machines, buses), strict=True):
        at_line = {
            (price["layout"], price["model"]): price
            for price in prices
            if price["machine"] == machine and price["bus"] == bus
        }
        ratios = [[at_line[at]["recompute"] / swap for swap in at_line[at]["swap"]] for at in lines]
        axes.pcolormesh(ratios, cmap=ListedColormap(COLOURS), norm=norm, edgecolor="white", lw=0.8)
        axes.invert_yaxis()
        axes.set_title(f"{machine}, {bus}")
        axes.grid(False)
        axes.set_xticks([i + 0.5 for i in range(len(sizes))], [str(size) for size in sizes])
        axes.set_yticks(
            [i + 0.5 for i in range(len(lines))],
            [f"{model}, {layout}" for layout, model in lines] if bus == buses[0] else [],
        )
        axes.tick_params(length=0, labelsize=8)
        axes.spines[:].set_visible(False)
        if machine == machines[-1]:
            axes.set_xlabel("block size (tokens)")
        axes.axhline(blocks, color=MUTED, lw=1)
    margins(figure, left=1.55, top=0.66, wspace=0.06, hspace=0.28)
    key(
        figure,
        {
            f"{number}": Patch(color=colour, label=meaning)
            for number, (colour, meaning) in enumerate(zip(COLOURS, MEANINGS, strict=True))
        },
    )
    return figure
