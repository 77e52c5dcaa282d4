"""Pictures of a report, drawn and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagedsim.report.style import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pagedsim.report.plots import Plot


@dataclass(frozen=True)
class Drawing:
    """A picture that is still to be drawn."""

    title: str
    caption: str
    draw: Callable[[], Figure]


def drawn(drawings: Mapping[str, Drawing]) -> list[Plot]:
    """The pictures; matplotlib is imported here, not before."""
    from pagedsim.report.plots import Plot, render

    with drawing():
        return [
            Plot(name, one.title, one.caption, *render(name, one.draw()))
            for name, one in drawings.items()
        ]


def write_page(folder: Path, text: str, plots: Sequence[Plot]) -> Path:
    """Write plots/<name>.png and report.html; returns the path of the report."""
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for plot in plots:
        (folder / "plots" / f"{plot.name}.png").write_bytes(plot.png)
    report = folder / "report.html"
    report.write_text(text, encoding="utf-8")
    return report
