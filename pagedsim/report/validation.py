"""The report of a validation: how far the simulator is from the engine, on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pagedsim.metrics.agreement import JUDGED, SHOWN, Agreement, Regime
from pagedsim.metrics.catalogue import label_of, latency_of, scale_of
from pagedsim.metrics.tables import Requests
from pagedsim.report.percent import percent, signed
from pagedsim.report.pictures import Drawing, write_illustrated
from pagedsim.report.style import (
    key,
    looks,
    margins,
    new_figure,
    plain_log_ticks,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHARES = np.linspace(0, 1, 241)
_WIDE = 20
"""A largest value so many times the smallest is drawn on a logarithmic axis."""
_TITLE = "How far is the simulator from the engine?"


@dataclass(frozen=True)
class Validation:
    """All that was found."""

    regimes: Sequence[Regime]
    machine: Mapping[str, Any]
    command: str
    steps: int
    """Of the engine's runs; the simulator plans each of them alike."""
    calibration: Mapping[str, Any]
    notes: Sequence[str]

    def record(self) -> dict[str, Any]:
        """As validate.json has it."""
        return {
            "command": self.command,
            "machine": dict(self.machine),
            "replayed_steps": self.steps,
            "calibration": dict(self.calibration),
            "notes": list(self.notes),
            "regimes": {regime.name: _record(regime) for regime in self.regimes},
        }


def _record(regime: Regime) -> dict[str, Any]:
    return {
        "load": regime.load,
        "rate": regime.rate,
        "requests": regime.simulator_requests.num_rows,
        "runs": len(regime.engine),
        "tolerance": regime.tolerance,
        "pace": list(regime.pace),
        "verdicts": regime.verdicts(),
        "metrics": {name: found._asdict() for name, found in regime.agreements().items()},
        "by_request": {name: near._asdict() for name, near in regime.nearness().items()},
    }


def show_validation(done: Validation) -> None:
    """Print a table for each regime, and what it comes to."""
    console = Console(highlight=False)
    for regime in done.regimes:
        console.print(f"\n[bold]{_headline(regime)}[/bold]")
        head, rows = _metrics(regime)
        _print(console, head, rows)
        head, rows = _requests(regime)
        _print(console, head, rows)
        console.print(_pace(regime))
        console.print(_verdict(regime))
    for note in done.notes:
        console.print(f"note: {note}")


def write_validation(done: Validation, folder: Path) -> Path:
    """Write report.html and plots/validation.png; returns the path of the report."""
    runs = len(done.regimes[0].engine)
    caption = (
        "The share of requests served within a time: the simulator's curve over those of the "
        f"engine's runs, {runs} of the same requests. Where these differ, so may the simulator."
    )
    picture = Drawing("Distributions", caption, lambda: draw_validation(done.regimes))
    return write_illustrated(folder, _TITLE, _parts(done), {"validation": picture})


def _parts(done: Validation) -> list[str]:
    from pagedsim.report.html import grid

    machine = done.machine
    where = f"{machine['device']}, {machine['model']}, {machine['dtype']}"
    blocks = f"{machine['blocks']} blocks of {machine['block_size']} tokens"
    found = "".join(f"<p>{escape(_verdict(regime))}</p>" for regime in done.regimes)
    notes = "".join(f'<p class="sure">Note: {escape(note)}.</p>' for note in done.notes)
    parts = [
        '<p class="eyebrow">pagedsim study · validate</p>',
        f"<h1>{_TITLE}</h1>",
        f'<p class="question">{escape(where)}, {blocks}. Step times are fitted to other requests '
        f"than these; all {done.steps:,} steps of the engine are planned by the simulator alike."
        "</p>",
        f'<section class="finding">{found}{notes}</section>',
    ]
    for regime in done.regimes:
        parts += [f"<h2>{escape(_headline(regime))}</h2>"]
        parts += [grid(*_metrics(regime)), grid(*_requests(regime))]
        parts += [f'<p class="note">{escape(_pace(regime))}.</p>']
    parts.append(
        '<p class="note">Spread: the standard deviation over the engine’s runs of the same '
        "requests; of single requests, how far one run is from the mean of all, on average. MAPE: "
        "the mean of how far single requests are off. Bias: of their mean. At its pace: the median "
        "error where the simulator is given the pace of the very run that it is held against, so "
        "that a machine which changes its pace is taken out; no prediction, but what is left to "
        "the model.</p>"
    )
    return [*parts, f"<h2>To run it again</h2><pre><code>{escape(done.command)}</code></pre>"]


def _headline(regime: Regime) -> str:
    count = regime.simulator_requests.num_rows
    load = f"{percent(regime.load, 0)} of what can be served"
    return f"{regime.name}: {count} requests at {regime.rate:.3g}/s, {load}"


def _verdict(regime: Regime) -> str:
    found, agreements = regime.verdicts(), regime.agreements()
    words = [f"{label_of(key)} {signed(agreements[key].error)}, {found[key]}" for key in JUDGED]
    return f"{regime.name}: {'; '.join(words)}"


def _pace(regime: Regime) -> str:
    runs = ", ".join(map(signed, regime.pace))
    left = regime.agreements()
    words = ", ".join(f"{label_of(key)} {signed(left[key].at_pace)}" for key in JUDGED)
    return (
        f"the same steps took the engine, against what was fitted: {runs}; where the simulator is "
        f"given each run's pace its errors are {words}"
    )


def _metrics(regime: Regime) -> tuple[list[str], list[list[str]]]:
    head = ["", "engine", "spread", "simulator", "error", "at its pace", ""]
    verdicts = regime.verdicts()
    rows = [
        [label_of(key), *_cells(key, found), verdicts.get(key, "")]
        for key, found in regime.agreements().items()
    ]
    return head, rows


def _cells(key: str, found: Agreement) -> list[str]:
    scale = scale_of(key, [found.engine, found.simulator])
    spread = "–" if found.spread != found.spread else f"± {percent(found.spread)}"
    return [
        scale.text(found.engine),
        spread,
        scale.text(found.simulator),
        signed(found.error),
        signed(found.at_pace),
    ]


def _requests(regime: Regime) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            label_of(name),
            percent(near.mape),
            percent(near.spread),
            f"{near.pearson:.3f}",
            signed(near.bias),
        ]
        for name, near in regime.nearness().items()
    ]
    return ["request by request", "MAPE", "engine’s own", "Pearson r", "bias"], rows


def _print(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if 0 < number < 6 else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def draw_validation(regimes: Sequence[Regime]) -> Figure:
    """A row of panels a regime, a panel each for TTFT, TPOT and E2E."""
    look = looks(["engine", "simulator"])
    figure = new_figure(0.75 + 2.0 * len(regimes))
    panels = figure.subplots(len(regimes), len(SHOWN), squeeze=False, sharey=True)
    for row, regime in zip(panels, regimes, strict=True):
        runs = [Requests.of(table) for table in regime.engine_requests]
        mine = Requests.of(regime.simulator_requests)
        for axes, name in zip(row, SHOWN, strict=True):
            columns = (latency_of(name, run) for run in (*runs, mine))
            every = [values[~np.isnan(values)] for values in columns]
            scale = scale_of(f"{name}_mean", [float(np.median(every[-1]))])
            for number, values in enumerate(every):
                own = look["simulator" if number == len(runs) else "engine"]
                curve = np.quantile(values, _SHARES) * scale.factor
                axes.plot(curve, _SHARES, color=own.colour, linestyle=own.dashes)
            _axis(axes, np.concatenate(every) * scale.factor)
            axes.set_title(f"{label_of(name)}, {regime.name}")
            tidy(axes, x=scale.suffix)
    for axes in panels[:, 0]:
        axes.set_ylim(0, 1.01)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "25 %", "50 %", "75 %", "99 %"])
        axes.set_ylabel("share of requests")
    margins(figure)
    figure.subplots_adjust(hspace=0.55, wspace=0.12)
    key(figure, look)
    return figure


def _axis(axes: Axes, values: np.ndarray) -> None:
    low, high = float(values.min()), float(values.max())
    if 0 < low < high / _WIDE:
        axes.set_xscale("log")
        plain_log_ticks(axes.xaxis)
