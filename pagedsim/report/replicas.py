"""Tables and plots of a fleet's replicas: a row each, or a summary of many; balance over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.catalogue import Scale, label_of, scale_of
from pagedsim.metrics.result import Listing
from pagedsim.metrics.tables import NAN
from pagedsim.report.figures import time_axis
from pagedsim.report.gantt import shown_arms
from pagedsim.report.load import mean_by_replica
from pagedsim.report.style import (
    GRID,
    INK,
    MUTED,
    key,
    looks,
    margins,
    new_figure,
    short,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 16
"""Maximum number of replicas with a row each; above it there are quartiles and extremes."""
_EXTREMES = 3
_ARMS = 4
"""Maximum number of arms with a table each; above it each has a row."""
_METRICS = (
    *("kv_utilisation_mean", "batch_size_mean", "hit_rate", "preemptions"),
    *("ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean"),
)
_ONLY_IF_ANY = ("hit_rate", "preemptions")
_WORDS = ("pool", "role", "hardware")
_MEANING = (
    "Load is the tokens that steps computed, over the mean of all replicas of a role; busy is the "
    "share of the makespan that steps took"
)


class _Column(NamedTuple):
    label: str
    values: Sequence[float]
    scale: Scale

    def cell(self, value: float) -> str:
        return self.scale.text(value)

    def span(self) -> str:
        """The range of the values."""
        known = [value for value in self.values if value == value]
        if not known:
            return self.cell(NAN)
        low, high = self.scale.number(min(known)), self.cell(max(known))
        return high if min(known) == max(known) else f"{low} to {high}"


def replica_listings(study: Arms) -> list[Listing]:
    """Tables of the replicas in the first run of each arm; empty for single servers."""
    runs = [run for run in (study.of(arm)[0] for arm in study.arms) if run.replicas]
    if len(runs) > _ARMS:
        return [_ranges(runs), *_transfers(runs)]
    several = len(study.arms) > 1
    return [*(_listing(run, several) for run in runs), *_transfers(runs)]


def _listing(run: Run, several: bool) -> Listing:
    rows = run.replicas
    title = f"Replicas of {run.arm}" if several else "Replicas"
    words = [name for name in _WORDS if len({row[name] for row in rows}) > 1]
    columns = list(_columns(rows))
    head = ["", *words, *(column.label for column in columns)]
    chosen, note = _chosen(rows)
    cells = [
        [rows[index]["name"], *(rows[index][name] for name in words)]
        + [column.cell(column.values[index]) for column in columns]
        for index in chosen
    ]
    if len(chosen) < len(rows):
        blank = [""] * len(words)
        summed = [*_pools(rows, columns), *_quartiles(columns)]
        cells = [*([name, *blank, *values] for name, values in summed), *cells]
    return Listing(title, head, cells, f"{_MEANING}; seed {run.seed}.{note}")


def _columns(rows: Sequence[Mapping[str, Any]]) -> Iterator[_Column]:
    counts, shares = Scale(1.0, "", whole=True), Scale(100.0, "%")
    yield _Column("Requests", [row["requests"] for row in rows], counts)
    yield _Column("Load", [row["load"] for row in rows], shares)
    yield _Column("Busy", [row["busy"] for row in rows], shares)
    for name in _METRICS:
        values = [float(row[name]) for row in rows]
        if name not in _ONLY_IF_ANY or any(value > 0 for value in values):
            yield _Column(label_of(name), values, scale_of(name, values))


def _chosen(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[int], str]:
    """The replicas with a row, and a note on the others."""
    if len(rows) <= MOST:
        return range(len(rows)), ""
    order = sorted(range(len(rows)), key=lambda index: -rows[index]["computed_tokens"])
    said = (
        f" Of {len(rows):,} replicas there are quartiles, of each column by itself, and those "
        f"with the {_EXTREMES} largest and the {_EXTREMES} smallest loads; summary.json has all."
    )
    return [*order[:_EXTREMES], *order[-_EXTREMES:]], said


def _pools(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[_Column]
) -> Iterator[tuple[str, list[str]]]:
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    for pool in pools if len(pools) > 1 else ():
        mine = [index for index, row in enumerate(rows) if row["pool"] == pool]
        means = [_mean([column.values[index] for index in mine]) for column in columns]
        cells = [column.cell(mean) for column, mean in zip(columns, means, strict=True)]
        yield f"mean of {pool}", cells


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else NAN


def _quartiles(columns: Sequence[_Column]) -> Iterator[tuple[str, list[str]]]:
    for name, percent in (("most", 100), ("P75", 75), ("median", 50), ("P25", 25), ("least", 0)):
        yield name, [column.cell(_percentile(column.values, percent)) for column in columns]


def _percentile(values: Sequence[float], percent: float) -> float:
    known = [value for value in values if value == value]
    return float(np.percentile(known, percent)) if known else NAN


def _ranges(runs: Sequence[Run]) -> Listing:
    every = [{column.label: column.span() for column in _columns(run.replicas)} for run in runs]
    head = list(dict.fromkeys(label for spans in every for label in spans))
    rows = [
        [run.arm, str(len(run.replicas)), *(spans.get(label, "–") for label in head)]
        for run, spans in zip(runs, every, strict=True)
    ]
    note = f"From the least to the most of an arm's replicas. {_MEANING}; seed {runs[0].seed}."
    return Listing("Replicas of each arm", ["", "Replicas", *head], rows, note)


def _transfers(runs: Sequence[Run]) -> Iterator[Listing]:
    """KV transfers between replicas, one row per arm."""
    transfers = [(run, run.summary["transfers"]) for run in runs if "transfers" in run.summary]
    if not transfers:
        return
    head = ["", "Transfers", "GB", "Mean", "Waiting", "Busiest link", "Retries", "Lost"]
    rows = [
        [
            *(run.arm, f"{facts['transfers']:,}", f"{facts['bytes'] / 1e9:,.1f}"),
            _each(facts, "seconds"),
            _each(facts, "waiting_s"),
            Scale(100.0, "%").text(facts["busy_s"] / run.summary["makespan"]),
            *(f"{facts['retries']:,}", f"{facts['lost']:,}"),
        ]
        for run, facts in transfers
    ]
    note = "Keys and values between replicas, of all their GPUs: how long a transfer took, how "
    note += "long of that it waited for others, and the share of the makespan that the busiest "
    note += "link took for its bytes"
    yield Listing("Transfers", head, rows, f"{note}; seed {runs[0].seed}.")


def _each(facts: Mapping[str, float], name: str) -> str:
    mean = facts[name] / facts["transfers"] if facts["transfers"] else NAN
    return scale_of("e2e_mean", [mean]).text(mean)


BINS = 240
_NAMED = 16
"""Maximum number of replicas with tick labels."""


def draw_balance(study: Arms) -> Figure:
    """Requests at each replica over time: a column per arm, the range over replicas above, and a
    heat map with a row per replica below."""
    from matplotlib.patches import Patch

    arms = [arm for arm in shown_arms(study) if study.of(arm)[0].replicas]
    runs = [study.of(arm)[0] for arm in arms]
    look = looks(study.arms, bool(study.swept))
    most = max(len(run.replicas) for run in runs)
    rows = min(max(0.17 * most, 0.8), 3.4)
    figure = new_figure(1.1 + 1.5 + rows)
    panels = figure.subplots(2, len(arms), squeeze=False, sharex=True, height_ratios=[1.35, rows])
    courses = [mean_by_replica(run, BINS) for run in runs]
    top = max(float(values.max(initial=0)) for _, values in courses) or 1.0
    for column, (arm, run, (edges, values)) in enumerate(zip(arms, runs, courses, strict=True)):
        above, below = panels[:, column]
        colour = look[arm].colour
        above.stairs(
            values.max(axis=0), edges, baseline=values.min(axis=0), fill=True, color=GRID, lw=0
        )
        above.stairs(values.mean(axis=0), edges, baseline=None, color=colour, lw=1.4)
        above.set_title(short(arm, 96 // len(arms)))
        above.set_ylim(0, top * 1.04)
        tidy(above, y="requests" if column == 0 else None)
        _colours(below, run, edges, values, top, named=column == 0)
        tidy(below, x=time_axis([run]).text)
        if column:
            above.set_yticklabels([])
    panels[0, 0].set_xlim(0, max(float(edges[-1]) for edges, _ in courses))
    named = [name for _, name in _names(runs[0].replicas)]
    right = 0.85
    margins(figure, left=0.35 + 0.075 * max(map(len, [*named, "requests"])), right=right)
    figure.subplots_adjust(hspace=0.12, wspace=0.05)
    _scale_beside(figure, panels[1, -1], right)
    key(
        figure,
        {
            "range over replicas": Patch(color=GRID, label="least to most of all replicas"),
            **({"mean": look[arms[0]]} if len(arms) == 1 else {}),
        },
    )
    return figure


def _colours(
    axes: Axes,
    run: Run,
    edges: NDArray[np.float64],
    values: NDArray[np.float64],
    top: float,
    named: bool,
) -> None:
    """A heat map of requests with a row per replica."""
    count = len(values)
    axes.imshow(
        values,
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        vmin=0,
        vmax=top,
        extent=(edges[0], edges[-1], count - 0.5, -0.5),
    )
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if not named:
        axes.set_yticks([])
    else:
        places, names = zip(*_names(run.replicas), strict=True)
        axes.set_yticks(places, names, color=INK)


def _names(replicas: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Tick positions and labels: replicas; if too many, pools, or the first and the last."""
    if len(replicas) <= _NAMED:
        return [(row, replica["name"]) for row, replica in enumerate(replicas)]
    pools: dict[str, list[int]] = {}
    for row, replica in enumerate(replicas):
        pools.setdefault(replica["pool"], []).append(row)
    if 1 < len(pools) <= _NAMED:
        return [(sum(rows) / len(rows), pool) for pool, rows in pools.items()]
    return [(row, replicas[row]["name"]) for row in (0, len(replicas) - 1)]


def _scale_beside(figure: Figure, axes: Axes, right: float) -> None:
    box, width = axes.get_position(), figure.get_size_inches()[0]
    beside = figure.add_axes((1 - (right - 0.12) / width, box.y0, 0.11 / width, box.height))
    scale = figure.colorbar(axes.images[0], cax=beside)
    scale.outline.set_visible(False)
    beside.tick_params(length=2)
    beside.set_title("requests", fontsize=7.5, loc="left", color=MUTED)
