from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pagedsim.metrics.compare import compare, estimate, values_of
from pagedsim.report.comparison import COLUMNS, write_comparison, write_rows
from tests.metrics.tables import study_of


def test_every_comparison_is_a_row(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    write_comparison(study, tmp_path / "comparison.csv")
    with (tmp_path / "comparison.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == list(COLUMNS)
    found = compare(study)
    assert len(rows) == len(found)
    for row, one in zip(rows, found, strict=True):
        named = dict(zip(header, row, strict=True))
        assert (named["client"], named["metric"]) == (one.client or "all", one.key)
        assert float(named["ours"]) == one.ours
        assert float(named["difference_low"] or "nan") == pytest.approx(
            one.difference.low, nan_ok=True
        )
        assert named["sure"] == str(one.sure)


def test_one_arm_has_its_metrics_alone(tmp_path: Path) -> None:
    study = study_of(tmp_path, arms=("a",))
    write_comparison(study, tmp_path / "comparison.csv")
    with (tmp_path / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        client = None if row["client"] == "all" else row["client"]
        values = values_of(study, "a", row["metric"], client)
        assert (row["arm"], int(row["seeds"])) == ("a", len(values))
        assert float(row["mean"] or "nan") == pytest.approx(
            estimate(list(values.values())).mean, nan_ok=True
        )
    assert {row["client"] for row in rows} == {"chat", "batch", "all"}


def test_rows_of_any_kind_are_written_and_what_is_not_known_is_empty(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"arm": "a", "rate": 2.5},
        {"arm": "b, c", "rate": float("nan"), "binds": "ttft"},
    ]
    write_rows(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["arm", "rate", "binds"],
            ["a", "2.5", ""],
            ["b, c", "", "ttft"],
        ]
