"""Reports: a study as a table on the terminal, as plots, as a page and as a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagedsim.report.console import show

if TYPE_CHECKING:
    from pagedsim.metrics.study import Study

__all__ = ["show", "write"]


def write(study: Study) -> Path:
    """Write plots/*.png, timeline.json and report.html into the study's folder.

    Returns the path of the report. matplotlib is imported here, not before.
    """
    from pagedsim.report.html import page
    from pagedsim.report.pictures import write_page
    from pagedsim.report.plots import draw
    from pagedsim.report.timeline import write_timeline

    folder = study.folder
    plots = draw(study) if study.runs else []
    write_timeline(study, folder / "timeline.json")
    return write_page(folder, page(study, plots), plots)
