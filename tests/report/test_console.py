"""Output of a study on the terminal and in comparison.csv."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from pagedsim import report
from pagedsim.metrics.arms import Arms
from pagedsim.report.table import columns_of, sections, write_columns
from tests.metrics.tables import result_of, study_of


def shown(study: Arms, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.show(result_of(study), study if study.runs else None, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("width", "name", "swept"),
    [
        (50, "urgent", None),
        (80, "the name of a policy " * 3, None),
        (62, "1", "policy.tokens_per_second"),
    ],
)
def test_a_narrow_terminal_cuts_no_number(
    width: int, name: str, swept: str | None, tmp_path: Path
) -> None:
    study = study_of(tmp_path, arms=("fcfs", name))
    if swept:
        study.swept, study.clients = swept, ()
    text = shown(study, width)
    assert "…" not in text
    heading = text.partition("──")[0].splitlines()[-2]
    assert (swept or "").rpartition(".")[2] in heading
    assert max(map(len, text.partition("──")[2].splitlines())) <= width
    for part in sections(study):
        assert all(cell.text in text for row in part.rows.values() for cell in row.values())


def test_what_has_no_ratio_shows_its_difference(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=2)
    study.metrics, study.clients = ("kv_waste_mean", "preemptions"), ()
    for run in study.runs:
        urgent = run.arm == "urgent"
        run.summary["kv_waste_mean"] = -0.808 if urgent else -0.914
        run.summary["preemptions"] = 3 if urgent else 0
    [part] = sections(study)
    assert [cell.change for cell in part.rows["urgent"].values()] == ["+10.6 pp", "+3"]
    assert "+10.6 pp" in shown(study)


@pytest.mark.parametrize(
    ("ratio", "change"),
    [(1.0002, "±0 %"), (0.95, "−5.0 %"), (0.5, "−50 %"), (0.00004, "−99.9 %"), (150, "×150")],
)
def test_a_change_is_no_more_than_it_is(tmp_path: Path, ratio: float, change: str) -> None:
    study = study_of(tmp_path, seeds=2)
    study.metrics, study.clients = ("ttft",), ()
    for run in study.runs:
        run.summary["ttft_mean"] = 3.0 * (ratio if run.arm == "urgent" else 1)
    [part] = sections(study)
    cell = part.rows["urgent"]["ttft_mean"]
    assert cell.change == change


def test_what_is_best_is_marked_and_the_change_judged(tmp_path: Path) -> None:
    chat = next(part for part in sections(study_of(tmp_path)) if part.client == "chat")
    slow, fast = (row["ttft_mean"] for row in chat.rows.values())
    assert (slow.best, fast.best) == (False, True)
    assert (slow.change, slow.verdict) == ("", "unsure")
    assert fast.change.startswith("−") and fast.verdict == "better"


# -- comparison.csv --------------------------------------------------------------------------------


def test_rows_of_any_kind_are_written_and_what_is_not_known_is_empty(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"arm": "a", "rate": 2.5},
        {"arm": "b, c", "rate": float("nan"), "binds": "ttft"},
    ]
    write_columns(columns_of(rows), tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["arm", "rate", "binds"],
            ["a", "2.5", ""],
            ["b, c", "", "ttft"],
        ]
