"""Figure 2 of the PagedAttention paper: what the memory of keys and values is used for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.papers.curves import keyed
from experiments.papers.memory_observed import KINDS
from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.report.style import (
    DECODE,
    INK,
    PAPER,
    PREFILL,
    QUEUED,
    YIELD,
    new_figure,
    tidy,
)
from pagedsim.run.study import Reading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = ("token states", "reserved", "internal fragmentation", "external fragmentation")
_COLOURS = (DECODE, PREFILL, YIELD, QUEUED)
_FAR = 0.03
"""A difference that wants a reason."""
_ROOMY = 4
"""Percent of a bar that have room for a number."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse(Reproduction):
    """Shares of the slots while requests wait, averaged over time and seeds."""

    systems: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them."""
    largest: str
    """Of these, the one that reserves the greatest length for everybody."""
    variants: Mapping[str, Sequence[str]] | None
    """What the paper leaves open, decided otherwise: overrides for all systems."""
    published: Mapping[str, Sequence[float | None]]
    """Of each system the four shares, in percent; null: not printed."""
    warm_up: float
    """Seconds at the beginning that do not count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("warm_up", self.warm_up, 0)
        if self.largest not in self.systems:
            raise ConfigError(f"largest={self.largest}: must be one of {', '.join(self.systems)}")
        for system in self.systems:
            if len(self.published.get(system, ())) != len(NAMES):
                raise ConfigError(
                    f"published.{system}={self.published.get(system)}: must be {len(NAMES)} "
                    f"numbers (or null): {', '.join(NAMES)}"
                )

    def arms(self) -> dict[str, list[str]]:
        return {
            _arm(system, variant): [*changes, *more]
            for variant, more in {"": (), **(self.variants or {})}.items()
            for system, changes in self.systems.items()
        }

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        found = {
            variant: {
                system: [_shares(run, self.warm_up) for run in runs[_arm(system, variant)]]
                for system in self.systems
            }
            for variant in ("", *(self.variants or ()))
        }
        means = {
            variant: {system: 100 * np.mean(each, axis=0) for system, each in systems.items()}
            for variant, systems in found.items()
        }
        data = {
            "ours": {system: shares.tolist() for system, shares in means[""].items()},
            "published": {system: list(self.published[system]) for system in self.systems},
        }
        rows = self._rows(means)
        return Reading(
            finding=self._finding(means, rows, found[""]),
            rows=[*rows, *_closed_form(runs[self.largest][0], self.warm_up)],
            listings=[self._listing(variant, means[variant]) for variant in self.variants or ()],
            data=data,
            drawings={
                "memory": Drawing(
                    "What the slots are for",
                    "Averages over the time in which requests wait. For paged memory the paper "
                    "prints token states alone.",
                    partial(draw_shares, data),
                )
            },
        )

    def _rows(self, means: Mapping[str, Mapping[str, NDArray[np.float64]]]) -> list[Row]:
        rows = []
        for system in self.systems:
            for i, (name, printed) in enumerate(zip(NAMES, self.published[system], strict=True)):
                row = Row(f"{system}: {name}", float(means[""][system][i]), printed, "%")
                if abs(row.difference) > _FAR:
                    others = [f"{means[v][system][i]:.1f} % with {v}" for v in self.variants or ()]
                    row = Row(row.what, row.ours, printed, "%", why="; ".join(others))
                rows.append(row)
        return rows

    def _finding(
        self,
        means: Mapping[str, Mapping[str, NDArray[np.float64]]],
        rows: Sequence[Row],
        seeds: Mapping[str, Sequence[Sequence[float]]],
    ) -> list[str]:
        stored = {system: shares[0] for system, shares in means[""].items()}
        most = max(stored, key=lambda system: stored[system])
        others = ", ".join(f"{v:.1f} % under {s}" for s, v in stored.items() if s != most)
        spread = max(100 * float(np.std(each, axis=0).max()) for each in seeds.values())
        several = any(len(each) > 1 for each in seeds.values())
        sure = (
            f"seeds differ by {spread:.1f} points (standard deviation)" * several or "of one seed"
        )
        worst = max(rows, key=lambda row: -1 if math.isnan(row.difference) else abs(row.difference))
        sentences = [
            f"While requests wait, {stored[most]:.1f} % of the slots hold tokens under {most}, and "
            f"{others}.",
            f"The largest difference from the paper is that of {worst.what}: {worst.ours:.1f} "
            f"where {worst.published} % is printed ({100 * worst.difference:+.0f} %); {sure}.",
        ]
        for variant in self.variants or ():
            off = max(
                abs(means[variant][system][i] / printed - 1)
                for system in self.systems
                for i, printed in enumerate(self.published[system])
                if printed
            )
            sentences.append(
                f"With {variant} all printed numbers are met within {100 * off:.0f} %."
            )
        return sentences

    def _listing(self, variant: str, means: Mapping[str, NDArray[np.float64]]) -> Listing:
        return Listing(
            f"The same with {variant} (%)",
            ["", *NAMES],
            [[system, *(f"{share:.1f}" for share in means[system])] for system in self.systems],
        )


def _arm(system: str, variant: str) -> str:
    return f"{system}, {variant}" if variant else system


def _shares(run: Run, warm_up: float) -> list[float]:
    """The shares of a run while requests wait, averaged over time."""
    return [_while_waiting(run, warm_up, kind) for kind in KINDS]


def _while_waiting(run: Run, warm_up: float, name: str) -> float:
    """The mean of a column over the time of the steps that were looked at while requests wait."""
    steps = run.steps("start", "end", "waiting", "stored", name)
    column = {key: np.asarray(steps[key].to_numpy()) for key in steps.column_names}
    taken = (column["waiting"] > 0) & (column["start"] >= warm_up) & ~np.isnan(column["stored"])
    if not taken.any():
        raise ConfigError(
            f"study.warm_up={warm_up:g}: must be shorter: "
            f"after that no request waits under {run.arm}"
        )
    seconds = (column["end"] - column["start"])[taken]
    return float(column[name][taken] @ seconds / seconds.sum())


def _closed_form(run: Run, warm_up: float) -> list[Row]:
    """Where everybody reserves the greatest length, arithmetic tells how many there are."""
    slots = run.summary["total_blocks"] * run.summary["block_size"]
    longest = run.config["server"]["max_model_len"]
    count = slots // longest
    batched = round(_while_waiting(run, warm_up, "decode_seqs"), 9)
    return [
        Row(f"{run.arm}: requests at once, {slots:,} // {longest:,}", batched, count),
        Row(
            f"{run.arm}: slots that {count} × {longest:,} leave over",
            100 * _while_waiting(run, warm_up, "external"),
            100 * (1 - count * longest / slots),
            "%",
        ),
    ]


def draw_shares(data: Mapping[str, Any]) -> Figure:
    """Two stacked bars for each system: the paper's and ours."""
    figure = new_figure(4.0)
    axes = figure.subplots()
    places: list[float] = []
    for place, (system, ours) in enumerate(data["ours"].items()):
        for shift, shares in ((-0.21, data["published"][system]), (0.21, ours)):
            places.append(place + shift)
            _stack(axes, place + shift, shares)
        axes.annotate(
            system, (place, 0), (0, -20), textcoords="offset points", ha="center", va="top"
        )
    axes.set_xticks(places, ["paper", "ours"] * len(data["ours"]))
    axes.set_ylim(0, 100)
    axes.grid(axis="x", visible=False)
    tidy(axes, y="% of the slots")
    return keyed(figure, dict(zip(NAMES, _COLOURS, strict=True)))


def _stack(axes: Axes, at: float, shares: Sequence[float | None]) -> None:
    bottom = 0.0
    for share, colour in zip(shares, _COLOURS, strict=True):
        if share is None:
            continue
        axes.bar(at, share, 0.38, bottom, color=colour, lw=0)
        if share > _ROOMY:
            ink = INK if colour == QUEUED else PAPER
            where = (at, bottom + share / 2)
            axes.text(*where, f"{share:.1f}", ha="center", va="center", fontsize=8, color=ink)
        bottom += share
