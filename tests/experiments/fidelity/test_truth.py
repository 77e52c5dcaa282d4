"""Uncalibrated step times beside what was measured: what is reported, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from experiments.fidelity.truth_data import (
    DATA,
    FIRST,
    ONE,
    PROMPTS,
    SEVERAL,
    class_of,
    score,
    scored,
)
from pagedsim.core import ConfigError
from pagedsim.fidelity.step_tables.tables import read_table
from pagedsim.fidelity.step_tables.times import Point
from tests.run.studies import carried_out

pytestmark = pytest.mark.usefixtures("hydra")

TRUTH = ("experiment=truth", "jobs=1")
HEAD = "gpu,gpus,model,tokens_in_and_out,batch,latency_s"
ROWS = ("h100,1,llama-2-7b,128,1,1.0", "h100,2,llama-2-7b,128,16,1.0", "l4,1,llama-2-7b,64,1,3.0")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    path.write_text("\n".join([HEAD, *ROWS]) + "\n")
    return path


def test_a_table_of_one_s_own_is_scored(own: Path, tmp_path: Path) -> None:
    found = carried_out(tmp_path / "out", *TRUTH, "report=false", f"study.tables=[{own}]")
    assert found["finding"][0].startswith("Uncalibrated step times against these tables, median")
    with (tmp_path / "out" / "comparison.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["hardware"] for row in rows] == ["h100", "h100", "l4"]
    for row in rows:
        share = float(row["predicted_s"]) / float(row["measured_s"]) - 1
        assert float(row["error"]) == pytest.approx(share, rel=1e-4)
    groups = found["data"]["tables"]
    assert groups["own, h100"][ONE]["rows"] == groups["own, h100"][SEVERAL]["rows"] == 1
    assert "constants" not in found["data"] and "logs" not in found["data"]


def test_rows_that_no_server_could_run_so_are_said_to_be_all(tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    path.write_text(f"{HEAD}\nl4,1,llama-2-70b,128,1,1.0\n")
    found = carried_out(tmp_path / "out", *TRUTH, "report=false", f"study.tables=[{path}]")
    (said,) = found["finding"]
    assert said.startswith("No server could run any row as its table says")


def test_a_stack_is_taken_in_the_place_of_that_of_its_time(own: Path, tmp_path: Path) -> None:
    said = []
    for stack in ("ideal", "vllm-2023"):
        words = (*TRUTH, "report=false", f"study.tables=[{own}]", f"study.stack={stack}")
        found = carried_out(tmp_path / stack, *words)
        said.append(found["data"]["tables"]["own, h100"][ONE]["bias"])
    assert said[0] < said[1]


def test_it_is_drawn(own: Path, tmp_path: Path) -> None:
    words = (*TRUTH, "report=true", f"study.tables=[{own},{DATA / 'splitwise.csv'}]")
    found = carried_out(tmp_path / "out", *words)
    assert found["pictures"] == ["predicted", "errors"]
    assert all((tmp_path / "out" / "plots" / f"{one}.png").exists() for one in found["pictures"])
    assert found["data"]["not as the table says"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["study.tables=[none.csv]"], "study.tables=none.csv: no such file"),
        (["study.tables=[]"], "study.tables=[]: must name a file"),
        (["study.stack=vllm-1999"], "study.stack=vllm-1999: must be one of "),
        (["+study.logs.mine={requests: a.csv}"], "study.logs.mine: has requests: must have"),
        (
            ["+study.logs.mine={requests: no.csv, server: ['model=llama-2-7b']}"],
            "no.csv: no such file",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        carried_out(tmp_path, *TRUTH, "report=false", *words)
    assert says in str(error.value)


def test_a_table_of_which_no_row_is_left_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(f"{HEAD}\nh100,1,Deci/DeciLM-7B,128,1,1.0\n")
    with pytest.raises(ConfigError, match=r"all of its rows are left out: Deci/DeciLM-7B: its"):
        carried_out(tmp_path / "out", *TRUTH, "report=false", f"study.tables=[{path}]")


def test_scores_by_hand(own: Path) -> None:
    points = [Point(cell, "latency", "") for cell in read_table(own).cells]
    assert [class_of(point) for point in points] == [ONE, SEVERAL, ONE]
    assert class_of(points[0]._replace(metric="ttft")) == FIRST
    assert class_of(points[0]._replace(metric="prompt")) == PROMPTS
    found = score(scored(points, np.array([1.1, 0.5, 3.6])))  # 10, −50 and 20 % off
    assert (found.rows, found.worst.point) == (3, points[1])
    assert [found.median, found.bias] == pytest.approx([0.2, 0.1])
    assert found.p90 == pytest.approx(0.44)


@pytest.mark.slow
def test_everything_is_told(tmp_path: Path) -> None:
    """All tables of the folder, whichever there are, the fits and the logs."""
    found = carried_out(tmp_path, "experiment=truth", "report=false")
    told = {name.partition(",")[0] for name in found["data"]["tables"]}
    assert {path.stem for path in DATA.glob("*.csv")} | {"distserve"} <= told
    assert found["data"]["constants"] and found["data"]["logs"]
    assert [row for row in found["data"]["left out"] if "a100-80gb" in row]
