"""Reports of a study: terminal output, plots and an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagedsim.metrics.files import REPORT, TABLE
from pagedsim.report.console import show

if TYPE_CHECKING:
    from pagedsim.metrics.arms import Arms
    from pagedsim.metrics.result import Result
    from pagedsim.report.figures import FigureSpec

__all__ = ["show", "write"]


def write(
    result: Result,
    drawings: Mapping[str, FigureSpec],
    folder: Path,
    arms: Arms | None = None,
    broken: dict[str, str] | None = None,
    formats: Sequence[str] = ("png",),
) -> Path:
    """Write plots/<name>.png, in other `formats`, too, and the numbers of figures of lines as
    plots/<name>.csv; table.tex; and report.html, whose path is returned.

    With `arms` the page compares them. What is wrong with a user's plots that cannot be drawn is
    noted on it and added to `broken`, by name. matplotlib is imported here, not at module level.
    """
    from pagedsim.report.figures import drawn
    from pagedsim.report.html import page
    from pagedsim.report.print import csv_of, latex_of

    broken = {} if broken is None else broken
    vectors = [name for name in formats if name != "png"]
    plots, report = drawn(drawings, broken, vectors), folder / REPORT
    result = replace(result, notes=[*result.notes, *broken.values()])
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for plot in plots:
        place = folder / "plots" / plot.name
        place.with_name(f"{plot.name}.png").write_bytes(plot.png)
        for suffix, content in plot.files.items():
            place.with_name(f"{plot.name}.{suffix}").write_bytes(content)
        if plot.data is not None:
            place.with_name(f"{plot.name}.csv").write_text(csv_of(plot.data), encoding="utf-8")
    if arms is not None and arms.arms:
        (folder / TABLE).write_text(latex_of(arms), encoding="utf-8")
    report.write_text(page(result, plots, arms), encoding="utf-8")
    return report
