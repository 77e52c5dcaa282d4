"""Figure 18 of the PagedAttention paper: which block size serves best, and what small ones cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from experiments.papers.reproduction import Reproduction
from experiments.studies.block_list import require_sizes
from experiments.studies.slot_waste import unused_slots
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole
from pagedsim.metrics.arms import Run
from pagedsim.metrics.files import RESULT
from pagedsim.metrics.jsons import read_json
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.block_sizes import draw_blocks
from pagedsim.report.percent import percent
from pagedsim.report.pictures import Drawing
from pagedsim.run.study import Reading
from pagedsim.sim.cost.kernel import slowdown
from pagedsim.user_error import shown

LATENCY = "normalized_latency_mean"


@dataclass(frozen=True)
class Load:
    """Requests of one kind; `best`: from which to which block size they are served best."""

    workload: str
    rate: float
    requests: int
    best: Sequence[int]

    def __post_init__(self) -> None:
        require_number("rate", self.rate, 0)
        require_whole("requests", self.requests, 1)
        require_sizes("best", self.best, least=2)


@dataclass(frozen=True)
class Variant:
    """Another choice where the paper leaves one open; None: that of the study."""

    overhead: float | None = None
    load: float = 1.0
    """Of the rates."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Of some loads, others."""
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.overhead is not None:
            require_number("overhead", self.overhead, 0)
        require_number("load", self.load, 0)
        for load, rate in self.rates.items():
            require_number(f"rates.{load}", rate, 0)


@dataclass(frozen=True, kw_only=True)
class Blocks(Reproduction):
    """Every block size under every load, as assumed and under each variant."""

    sizes: Sequence[int]
    slots: int
    """Tokens that the memory holds, whatever the block size."""
    overhead: float
    """What attention takes longer with blocks of `usual` tokens than in one piece, as a share."""
    usual: int
    within: float
    """As good as the best is what takes no more than this share longer."""
    loads: Mapping[str, Load]
    variants: Mapping[str, Variant] = field(default_factory=dict)
    kernel: str | None = None
    """A folder that experiment=block_sizes has left, for kernel times."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("sizes", self.sizes, least=2)
        require_whole("usual", self.usual, 1)
        require_number("overhead", self.overhead, 0)
        require_number("within", self.within, 0)
        self._measured()  # what is wrong with the file is told before anything runs
        for name, variant in self.variants.items():
            for one in variant.rates:
                if one not in self.loads:
                    raise ConfigError(
                        f"variants.{name}.rates.{one}: must be one of {', '.join(self.loads)}"
                    )
        for name, load in self.loads.items():
            if not set(load.best) <= set(self.sizes):
                raise ConfigError(f"sizes={list(self.sizes)}: must hold {load.best}, {name}'s best")

    @property
    def _all(self) -> dict[str, Variant]:
        return {"": Variant(), **self.variants}

    def block_tokens(self, variant: Variant) -> float:
        """What finding a block costs, in tokens read: all of the overhead is taken to be that."""
        return self.usual * (self.overhead if variant.overhead is None else variant.overhead)

    def _rate(self, load: str, variant: Variant) -> float:
        return variant.load * variant.rates.get(load, self.loads[load].rate)

    @property
    def _near(self) -> str:
        """How near the best counts as good."""
        return percent(self.within, 0)

    def arms(self) -> Mapping[str, Sequence[str]]:
        return {
            _arm(load, size, name): [
                f"workload={self.loads[load].workload}",
                f"workload.rate={self._rate(load, variant):g}",
                f"workload.requests={self.loads[load].requests}",
                f"memory.block_size={size}",
                f"memory.blocks={self.slots // size}",
                f"++cost.block_tokens={self.block_tokens(variant):g}",
                f"++cost.fitted_block_size={self.usual}",
                *variant.overrides,
            ]
            for name, variant in self._all.items()
            for load in self.loads
            for size in self.sizes
        }

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        latency = {
            name: {
                load: [_latency(runs[_arm(load, s, name)]) for s in self.sizes]
                for load in self.loads
            }
            for name in self._all
        }
        waste = {
            load: [
                fmean(unused_slots(run, size) for run in runs[_arm(load, size, "")])
                for size in self.sizes
            ]
            for load in self.loads
        }
        good = {
            name: {load: self._good(values) for load, values in of.items()}
            for name, of in latency.items()
        }
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
        return Reading(
            finding=self._finding(latency, good, waste),
            rows=self._rows(latency[""], good[""], waste),
            listings=[self._latencies(latency), self._winners(latency), self._kernels()],
            notes=self._notes(),
            data=data,
            drawings={"blocks": Drawing("Block sizes", caption, lambda: draw_blocks(data))},
        )

    # -- numbers -----------------------------------------------------------------------------------

    def _good(self, values: Sequence[float], within: float | None = None) -> list[int]:
        """The sizes as good as the best."""
        most = min(values) * (1 + (self.within if within is None else within))
        return [size for size, value in zip(self.sizes, values, strict=True) if value <= most]

    def _best(self, values: Sequence[float]) -> int:
        return self.sizes[int(np.argmin(values))]

    # -- words and tables --------------------------------------------------------------------------

    def _finding(
        self,
        latency: Mapping[str, Mapping[str, Sequence[float]]],
        good: Mapping[str, Mapping[str, Sequence[int]]],
        waste: Mapping[str, Sequence[float]],
    ) -> list[str]:
        told = []
        for load, sizes in good[""].items():
            values, low, high = latency[""][load], *self.loads[load].best
            largest, best = values[-1] / min(values), self._best(values)
            told.append(
                f"{load}: blocks of {best} serve best, and {_range(sizes)} come within "
                f"{self._near} of it (published: {low} to {high}); at {self.sizes[-1]} a "
                f"token takes {largest:.1f} times as long, at {self.sizes[0]} "
                f"{values[0] / min(values):.1f} times."
            )
        at = self.sizes.index(self.usual) if self.usual in self.sizes else 0
        wasted = ", ".join(f"{load} {values[at]:.1f}" for load, values in waste.items())
        told.append(
            f"Blocks of {self.sizes[at]} leave {wasted} slots a sequence unused, where "
            f"(B - 1) / 2 is {(self.sizes[at] - 1) / 2:g}."
        )
        for name in self.variants:
            each = ", ".join(f"{load} {_range(sizes)}" for load, sizes in good[name].items())
            told.append(f"With {name} these come within {self._near} of the best: {each}.")
        return told

    def _rows(
        self,
        latency: Mapping[str, Sequence[float]],
        good: Mapping[str, Sequence[int]],
        waste: Mapping[str, Sequence[float]],
    ) -> list[Row]:
        rows = []
        for load, one in self.loads.items():
            low, high = one.best
            best = self._best(latency[load])
            rows += [
                Row(f"{load}: best block size", best, (low, high), "tokens"),
                self._edge(load, "smallest", good[load][0], low, latency[load]),
                self._edge(load, "largest", good[load][-1], high, latency[load]),
            ]
            for size, value in zip(self.sizes, waste[load], strict=True):
                if size in (self.usual, self.sizes[-1]):
                    short = "sequences are shorter than a block" if value > 0.6 * size else ""
                    what = f"{load}: unused slots a sequence, blocks of {size}"
                    rows.append(Row(what, value, (size - 1) / 2, "", short))
        return rows

    def _edge(
        self, load: str, which: str, ours: int, published: int, values: Sequence[float]
    ) -> Row:
        """The smallest or largest size that is as good as the best."""
        why = ""
        if ours != published and ours in self.sizes:
            more = values[self.sizes.index(ours)] / min(values) - 1
            why = (
                f"blocks of {ours} take {percent(more, 0)} longer than the best; the paper does "
                "not say what counts as good, and the table below has other bounds"
            )
        return Row(f"{load}: {which} within {self._near}", ours, published, "tokens", why)

    def _latencies(self, latency: Mapping[str, Mapping[str, Sequence[float]]]) -> Listing:
        head = ["time per token, ms", *map(str, self.sizes)]
        rows = [
            [f"{load}{name and ', '}{name}", *(f"{1e3 * value:,.0f}" for value in values)]
            for load in self.loads
            for name, of in latency.items()
            for values in (of[load],)
        ]
        return Listing("Figure 18b, with other assumptions", head, rows)

    def _winners(self, latency: Mapping[str, Mapping[str, Sequence[float]]]) -> Listing:
        bounds = sorted({self.within, 0.2, 0.5})
        head = ["as good as the best", *(f"within {percent(bound, 0)}" for bound in bounds)]
        rows = [
            [
                f"{load}{name and ', '}{name}",
                *(_range(self._good(of[load], bound)) for bound in bounds),
            ]
            for load in self.loads
            for name, of in latency.items()
        ]
        return Listing("Which sizes are good, by what counts as good", head, rows)

    def _kernels(self) -> Listing:
        """Figure 18a: assumed, and measured where there was a GPU."""
        shares = sorted({0.2, self.overhead, 0.26})
        mine = self._measured()
        head = ["decode attention, × in one piece", *map(str, self.sizes)]
        rows = [
            [
                f"assumed, {percent(share, 0)} at {self.usual}",
                *(f"{slowdown(size, share * self.usual):.2f}" for size in self.sizes),
            ]
            for share in shares
        ]
        measured = [f"{mine[size]:.2f}" if size in mine else "–" for size in self.sizes]
        return Listing(
            "Figure 18a: what small blocks cost the kernel",
            head,
            [*rows, ["measured here", *measured]],
        )

    def _measured(self) -> dict[int, float]:
        """Times of our kernel by block size, over the shortest."""
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
    return f"{load}, blocks of {size}{variant and ', '}{variant}"


def _latency(runs: Sequence[Run]) -> float:
    return fmean(run.summary[LATENCY] for run in runs)


def _range(sizes: Sequence[int]) -> str:
    """Sizes for reading."""
    return f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 2 else " and ".join(map(str, sizes))
