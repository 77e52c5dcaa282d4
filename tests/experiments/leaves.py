"""What a study must leave in its folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from pagedsim.run.help import Experiment

ALWAYS = {"config.yaml", "result.json", "comparison.csv", "report.html", "plots"}


def check_leaves(folder: Path, one: Experiment) -> None:
    """Fail unless it is all there, whole, and nothing that --help does not tell of."""
    left = {path.name for path in folder.iterdir()} - {"wandb"}
    tables = {"runs", "timeline.json"} if one.keeps_tables else {"runs"} if one.runs else set()
    assert (
        left - {"cost.json", "fit.json"} - {name for name in left if "=" in name} == ALWAYS | tables
    )
    result = json.loads((folder / "result.json").read_text())
    assert result["experiment"] == one.name and result["finding"] and result["title"]
    with (folder / "comparison.csv").open() as file:
        assert all(row.values() for row in csv.DictReader(file))
    page = (folder / "report.html").read_text()
    assert result["finding"][0].split()[0] in page and "To run it again" in page
    for name in result["pictures"]:
        assert (folder / "plots" / f"{name}.png").stat().st_size > 0
    if one.keeps_tables:
        runs = list((folder / "runs").glob("*/seed-*"))
        assert runs
        for run in runs:
            assert {"requests.parquet", "steps.parquet", "summary.json", "run.json"} <= {
                path.name for path in run.iterdir()
            }
        assert json.loads((folder / "timeline.json").read_text())["traceEvents"]
