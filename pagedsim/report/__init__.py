"""Reports: what a study found, on the terminal, as plots and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pagedsim.report.console import show

if TYPE_CHECKING:
    from pagedsim.metrics.arms import Arms
    from pagedsim.metrics.result import Result
    from pagedsim.report.pictures import Drawing

__all__ = ["show", "write"]


def write(
    result: Result, drawings: Mapping[str, Drawing], folder: Path, arms: Arms | None = None
) -> Path:
    """Write plots/<name>.png and report.html, whose path is returned.

    With `arms` the page has these side by side. matplotlib is imported here, not before.
    """
    from pagedsim.report.html import page
    from pagedsim.report.pictures import drawn, write_page

    plots = drawn(drawings)
    return write_page(folder, page(result, plots, arms), plots)
