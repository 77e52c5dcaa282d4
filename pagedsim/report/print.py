"""Figures and tables for a paper: of a column's width, readable in grey, with fonts that may be
embedded; the numbers of a figure as CSV; a table in LaTeX."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import label_of
from pagedsim.report.figures import FigureData, Panel, Series, draw_band, set_scales
from pagedsim.report.style import Look, looks, short
from pagedsim.report.table import Cell, keys_in, means_over, sections, versus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROW, WIDE = 1.5, 13.0
"""Widths in inches between which a figure is drawn for print."""
_PANEL = 1.6
"""Inches that a panel needs across, and down."""
_FONT = 7.5
_MARKERS = "osD^vPX*"
_MARKED = 12
"""Longer lines have no markers."""


def draw_print(data: FigureData, arms: Sequence[str], swept: bool, width: float) -> Figure:
    """The panels of a figure of lines at a width in inches, with a legend above. Lines differ by
    dashes and markers, too, so that they are told apart in grey."""
    if not NARROW <= width <= WIDE:
        raise ConfigError(f"width={width}: must be {NARROW} to {WIDE} inches")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = max(1, min(data.across, len(data.panels), int(width / _PANEL)))
    rows = -(-len(data.panels) // across)
    figure = Figure(figsize=(width, _PANEL * rows + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, across, squeeze=False)
    names = _names(data, arms)
    look = looks(names, swept)
    for axes, panel in zip(grid.flat, data.panels, strict=False):
        for line in panel.series:
            _draw_line(axes, line, _name(line, panel), look)
        _label(axes, panel)
    for axes in grid.flat[len(data.panels) :]:
        axes.set_visible(False)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    if len(labels) > 1:
        columns = max(1, min(len(labels), int(width / 1.1)))
        figure.legend(
            handles, labels, loc="outside upper left", ncols=columns, fontsize=_FONT, frameon=False
        )
    return figure


def _names(data: FigureData, arms: Sequence[str]) -> list[str]:
    """The lines of all panels: arms in their order, then others."""
    lines = (_name(line, panel) for panel in data.panels for line in panel.series)
    used = list(dict.fromkeys(lines))
    return [*(arm for arm in arms if arm in used), *(name for name in used if name not in arms)]


def _name(line: Series, panel: Panel) -> str:
    """What tells a line from the others of its panel: its arm, or its client under that arm."""
    of_arm = [other for other in panel.series if other.arm == line.arm]
    return (line.client if len(of_arm) > 1 else line.arm or line.client) or "all"


def _draw_line(axes: Axes, line: Series, name: str, look: Mapping[str, Look]) -> None:
    style: dict[str, Any] = {"color": look[name].colour, "ls": look[name].dashes, "lw": 1.1}
    if len(line.x) <= _MARKED:
        style |= {"marker": _MARKERS[[*look].index(name) % len(_MARKERS)], "ms": 3.2}
    draw_band(axes, line, look[name].colour)
    if line.until is None:
        axes.plot(line.x, line.y, label=short(name, 24), **style)
    else:
        held = np.append(line.y, line.y[-1:])
        axes.step(line.edges, held, where="post", label=short(name, 24), **style)


def _label(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=_FONT)
    axes.set_xlabel(panel.x.text, fontsize=_FONT)
    named = panel.title.startswith(panel.y.label)
    axes.set_ylabel(panel.y.unit if named else panel.y.text, fontsize=_FONT)
    set_scales(axes, panel)
    axes.tick_params(labelsize=_FONT, length=2, width=0.6)


# -- numbers ---------------------------------------------------------------------------------------


def csv_of(data: FigureData) -> str:
    """The numbers of a figure: a row for each point of each line."""
    text = StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["panel", "arm", "client", "x", "y", "low", "high", "x_axis", "y_axis"])
    for panel in data.panels:
        for line in panel.series:
            for x, y, low, high in _points(line):
                names = (panel.title, line.arm or "", line.client or "")
                lines.writerow([*names, x, y, low, high, panel.x.text, panel.y.text])
    return text.getvalue()


def _points(line: Series) -> Iterator[tuple[Any, ...]]:
    ends = (_texts(end) if end is not None else [""] * len(line.x) for end in (line.low, line.high))
    yield from zip(_texts(line.x), _texts(line.y), *ends, strict=True)


def _texts(values: Any) -> list[str]:
    return ["" if np.isnan(value) else repr(float(value)) for value in values]


# -- LaTeX -----------------------------------------------------------------------------------------

_SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "≥": r"$\geq$", "µ": r"$\mu$", "€": r"\texteuro{}",
}  # fmt: skip


def latex_of(study: Arms) -> str:
    """The comparison as a table of the package booktabs: means, the best in bold, and changes
    against the baseline, in brackets where not sure. A comment at the end says what means."""
    parts = sections(study)
    keys = keys_in(parts)
    head = " & ".join(["", *(_escaped(label_of(key)) for key in keys)])
    lines = [rf"\begin{{tabular}}{{l{'r' * len(keys)}}}", r"\toprule", rf"{head} \\"]
    for part in parts:
        lines.append(r"\midrule")
        if len(parts) > 1:
            lines.append(
                rf"\multicolumn{{{len(keys) + 1}}}{{l}}{{\emph{{{_escaped(part.title)}}}}} \\"
            )
        for arm, cells in part.rows.items():
            texts = [_cell(cells[key]) if key in cells else "--" for key in keys]
            lines.append(rf"{' & '.join([_escaped(arm), *texts])} \\")
    against = f"changes: against {versus(study)}, in brackets where not sure (95 %)"
    note = f"% {means_over(study, parts)}; {against}"
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", note, ""])


def _cell(cell: Cell) -> str:
    text = _escaped(cell.text)
    value = rf"\textbf{{{text}}}" if cell.best else text
    return rf"{value} {{\footnotesize {_escaped(cell.marked)}}}" if cell.change else value


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
