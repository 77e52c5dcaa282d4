from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pagedsim import report
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.result import Listing
from pagedsim.report.console import _change
from pagedsim.report.table import sections
from tests.metrics.tables import result_of, study_of, with_rejected


def shown(study: Arms, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.show(result_of(study), study if study.runs else None, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_arm_group_and_number(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    text = shown(study)
    assert study.title in text
    for part in sections(study):
        assert part.title in text
        for cells in part.rows.values():
            assert all(cell.text in text and cell.change in text for cell in cells)
    assert "below: against fcfs, seed by seed, in brackets where not sure" in text


def rows_of(text: str, arms: list[str]) -> list[tuple[str, list[str], list[str]]]:
    """Each arm's row of the table: its name, its cells, and the changes below them."""
    found: list[tuple[str, list[str], list[str]]] = []
    for line in text.partition("──")[2].splitlines()[1:]:
        first, *more = re.split(r"\s{2,}", line.strip())
        if first in arms:
            found.append((first, more, []))
        elif line.startswith("     ") and first:
            found[-1][2].extend([first, *more])
    return found


def test_every_cell_stands_in_its_own_row_and_column(tmp_path: Path) -> None:
    study = study_of(tmp_path, arms=("fcfs", "urgent", "third"))
    study.metrics = ("ttft_mean", "tpot_mean", "preemptions")
    rows = [row for part in sections(study) for row in part.rows.items()]
    assert rows_of(shown(study), study.arms) == [
        (arm, [cell.text for cell in cells], [_change(cell) for cell in cells if cell.change])
        for arm, cells in rows
    ]


def test_what_is_told_of_all_together_has_no_rows_of_clients_in_a_table_of_its_own(
    tmp_path: Path,
) -> None:
    study = study_of(tmp_path, seeds=1)
    study.metrics = ("ttft_mean", "makespan")
    latency, whole = shown(study, 24).split("Makespan")
    assert all(name in latency for name in ("chat", "batch", "all requests"))
    assert "chat" not in whole and "batch" not in whole
    assert whole.split()[1:3] == ["all", "requests"] and "fcfs" in whole


def test_arms_with_workloads_of_their_own_are_told(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    assert "different workloads" not in shown(study)
    first = study.runs[0]
    study.runs[0] = replace(first, config={**first.config, "workload": {"rate": 2}})
    text = " ".join(shown(study).split())
    assert "The arms had different workloads, drawn from the same seeds." in text


@pytest.mark.parametrize("width", [50, 64, 80])
def test_a_narrow_terminal_cuts_no_number(width: int, tmp_path: Path) -> None:
    study = study_of(tmp_path)
    text = shown(study, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for part in sections(study):
        assert all(cell.text in text for cells in part.rows.values() for cell in cells)


def test_a_long_name_is_broken_over_lines(tmp_path: Path) -> None:
    name = "a policy that goes by the name of a whole sentence"
    study = study_of(tmp_path, arms=("fcfs", name))
    text = shown(study, 80).partition("──")[2]
    assert max(map(len, text.splitlines())) <= 80
    firsts = [line[:26].strip() for line in text.splitlines()]
    assert "a policy that goes by" in firsts
    for part in sections(study):
        assert all(cell.text in text for cells in part.rows.values() for cell in cells)


def test_a_name_is_no_markup(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1, arms=("[bold]", "[/a]"))
    study.swept = "policy.[name]"
    text = shown(study).partition("──")[0] + "".join(
        name for name, *_ in rows_of(shown(study), study.arms)
    )
    assert "[name]" in text and text.endswith("[bold][/a]" * 3)


def test_tables_of_a_result_stand_below_its_arms(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    more = Listing("More", ["", "of it"], [["first", "1"]], "Counted by hand.")
    out = io.StringIO()
    result = replace(result_of(study), listings=[more], notes=["it was warm"])
    report.show(result, study, Console(file=out, width=100))
    *_, title, head, row, note, warm = (line.strip() for line in out.getvalue().splitlines())
    assert (title, head, row.split()) == ("More", "of it", ["first", "1"])
    assert (note, warm) == ("Counted by hand.", "note: it was warm")
    assert out.getvalue().index("Means over 3 seeds") < out.getvalue().index("More")


def test_what_has_no_ratio_shows_its_difference(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=2)
    study.metrics, study.clients = ("kv_waste_mean", "preemptions"), ()
    for run in study.runs:
        urgent = run.arm == "urgent"
        run.summary["kv_waste_mean"] = -0.808 if urgent else -0.914
        run.summary["preemptions"] = 3 if urgent else 0
    [part] = sections(study)
    assert [cell.change for cell in part.rows["urgent"]] == ["+10.6 pp", "+3"]
    assert "+10.6 pp" in shown(study)


def test_nothing_finished_leaves_no_empty_table(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1, arms=("run",))
    study.runs = [with_rejected(run, 40) for run in study.runs]
    study.metrics = ("ttft", "tpot")
    text = shown(study)
    assert "No request finished." in text
    assert "──" not in text and "run:" not in text


def test_one_seed_says_so(tmp_path: Path) -> None:
    text = shown(study_of(tmp_path, seeds=1))
    assert "One seed, no confidence intervals" in text


def test_an_empty_study(tmp_path: Path) -> None:
    assert "No run was completed." in shown(study_of(tmp_path, arms=()))


def test_what_is_best_is_marked_and_the_change_judged(tmp_path: Path) -> None:
    chat = next(part for part in sections(study_of(tmp_path)) if part.client == "chat")
    column = chat.keys.index("ttft_mean")
    slow, fast = (cells[column] for cells in chat.rows.values())
    assert (slow.best, fast.best) == (False, True)
    assert (slow.change, slow.verdict) == ("", "unsure")
    assert fast.change.startswith("−") and fast.verdict == "better"


def test_drawing_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, pagedsim.report, pagedsim.tracking; print(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"matplotlib", "wandb"} & set(child.stdout.split())
