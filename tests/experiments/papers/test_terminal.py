"""What the committed results of papers' experiments take of a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pagedsim import report
from pagedsim.experiments.papers.study import Figures
from pagedsim.experiments.regenerate import RESULTS
from pagedsim.metrics.files import RESULT, read_json
from pagedsim.metrics.result import Listing, Result, Row
from tests.run.studies import EXPERIMENTS

PAPERS = [one.name for one in EXPERIMENTS if issubclass(one.kind, Figures)]
LINES, WIDTH = 60, 80
"""One or two screens."""
FIELDS = ("what", "ours", "published", "unit", "why", "up_to")


def number_of(value: float | None) -> float:
    """NaN where the file has none."""
    return float("nan") if value is None else value


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_s_experiment_prints_a_screen_or_two(name: str) -> None:
    record = read_json(RESULTS / name / RESULT)
    rows = [{key: row[key] for key in FIELDS if key in row} for row in record["rows"]]
    for row in rows:
        row["ours"] = number_of(row["ours"])
        if isinstance(row["published"], list):
            row["published"] = tuple(row["published"])
    listing = Listing("Every arm", ["", "latency"], [["an arm", "1"]] * 99)
    result = Result(
        name=name,
        title=record["title"],
        question="",
        command=record["command"],
        finding=record["finding"],
        rows=[Row(**row) for row in rows],
        listings=[listing],
        notes=record["notes"],
        brief=True,
    )
    out = io.StringIO()
    report.show(result, console=Console(file=out, width=WIDTH))
    lines = out.getvalue().splitlines()
    assert sum(max(1, -(-len(line) // WIDTH)) for line in lines) <= LINES
