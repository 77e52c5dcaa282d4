"""Reports of a study: terminal output, plots and an HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagedsim.metrics.files import REPORT
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
) -> Path:
    """Write plots/<name>.png and report.html, whose path is returned.

    With `arms` the page compares them. What is wrong with a user's plots that cannot be drawn is
    noted on it and added to `broken`, by name. matplotlib is imported here, not at module level.
    """
    from pagedsim.report.figures import drawn
    from pagedsim.report.html import page

    broken = {} if broken is None else broken
    plots, report = drawn(drawings, broken), folder / REPORT
    result = replace(result, notes=[*result.notes, *broken.values()])
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for plot in plots:
        (folder / "plots" / f"{plot.name}.png").write_bytes(plot.png)
    report.write_text(page(result, plots, arms), encoding="utf-8")
    return report
