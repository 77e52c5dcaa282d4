"""Uncalibrated step times and the fit of their constants against measured step tables."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pagedsim.core import ConfigError
from pagedsim.experiments.fidelity.constants import BEGIN, DECIDED, fitted
from pagedsim.experiments.fidelity.truth import answered
from pagedsim.experiments.fidelity.truth_data import (
    DATA,
    EXPERTS,
    ONE,
    SEVERAL,
    WITHIN,
    Rows,
    peers_of,
    tables,
)
from pagedsim.experiments.regenerate import RESULTS
from pagedsim.fidelity.step_tables.schedule import Schedule, scheduled
from pagedsim.fidelity.step_tables.tables import Cell
from pagedsim.fidelity.step_tables.times import Constants, Point, Points
from pagedsim.metrics.files import RESULT, read_json
from pagedsim.sim.cost import Roofline, UnmeasuredError
from pagedsim.sim.replica import Replica
from tests.experiments.fidelity import power
from tests.experiments.fidelity.power import cases, fit, shipped
from tests.run.studies import carried_out

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
    assert found["finding"][0].startswith("Step times against these tables, median")
    with (tmp_path / "out" / "comparison.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["hardware"] for row in rows] == ["h100", "h100", "l4"]
    for row in rows:
        share = float(row["predicted_s"]) / float(row["measured_s"]) - 1
        assert float(row["error"]) == pytest.approx(share, rel=1e-4)
    groups = found["data"]["tables"]
    held = [name for name in groups if name.startswith("own, h100, vllm-0.6")]
    assert groups[held[0]][ONE]["rows"] == groups[held[0]][SEVERAL]["rows"] == 1
    assert "constants" not in found["data"] and "logs" not in found["data"]
    assert all(row["held_out"] == "True" for row in rows)  # no constant is fitted to them


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("l4,1,llama-2-70b,128,1,1.0", "No server could run any row as its table says"),
        ("h100,1,Deci/DeciLM-7B,128,1,1.0", "all of its rows are left out: Deci/DeciLM-7B: its"),
    ],
)
def test_a_table_without_usable_rows(row: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{HEAD}\n{row}\n")
    words = (*TRUTH, "report=false", f"study.tables=[{path}]")
    try:
        (finding,) = carried_out(tmp_path / "out", *words)["finding"]
    except ConfigError as error:
        finding = str(error)
    assert said in finding


def test_it_is_drawn(own: Path, tmp_path: Path) -> None:
    words = (*TRUTH, "report=true", f"study.tables=[{own},{DATA / 'splitwise.csv'}]")
    found = carried_out(tmp_path / "out", *words)
    assert found["pictures"] == ["predicted", "errors"]
    assert all((tmp_path / "out" / "plots" / f"{one}.png").exists() for one in found["pictures"])
    assert found["data"]["not as the table says"]


def test_batches_have_no_server_of_the_command(own: Path, tmp_path: Path) -> None:
    words = (*TRUTH, f"study.tables=[{own}]", "server=vllm-0.33")
    with pytest.raises(ConfigError, match=r"server=vllm-0.33: .* study.stack= is their stack"):
        carried_out(tmp_path / "out", *words)


def test_a_table_of_which_nothing_fits_has_its_report(tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    path.write_text(f"{HEAD}\nh100,1,llama-2-70b,128,1,1.0\n")
    result = carried_out(tmp_path / "out", *TRUTH, f"study.tables=[{path}]")
    assert result["finding"][0].startswith("No server could run any row")


def test_rows_of_servers_that_the_cost_model_does_not_know_are_left_out(own: Path) -> None:
    read, standing = tables([str(own)], None), Constants.standing()

    def cost_of(replica: Replica, stack: str) -> Roofline:
        if replica.hardware.name in lacking:
            raise UnmeasuredError(f"hardware={replica.hardware.name}: no kernels of it")
        return standing.cost_of(replica, stack)

    lacking = {"l4"}
    (table,), notes = answered(read, cost_of)
    assert [cell.hardware.name for cell in table.cells] == ["h100", "h100"]
    assert notes == ["rows left out: 1, hardware=l4: no kernels of it"]
    lacking |= {"h100"}
    with pytest.raises(UnmeasuredError, match="hardware=h100: no kernels of it"):
        answered(read, cost_of)


def test_rows_of_servers_stand_beside_their_peers(tmp_path: Path) -> None:
    """Four rows of the table of servers, which AIConfigurator has answered, too, and one of
    experts, which stands apart."""
    head, *rows = (DATA / "servers.csv").read_text().splitlines()
    few = [row for row in rows if ",70B," in row or "1024x128_c8_" in row][:4]
    few += [row for row in rows if "235b_a22b_fp8_h200_sxm_sglang_agg_1000x100_c3_" in row]
    path = tmp_path / "few.csv"
    path.write_text("\n".join([head, *few]) + "\n")
    scored = carried_out(tmp_path / "out", *TRUTH, "report=false", f"study.tables=[{path}]")
    with (tmp_path / "out" / "comparison.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["what"] for row in found] == len(few) * ["TTFT", "TPOT", "E2E"]
    names = [row.split(",")[0] for row in few]
    assert list(dict.fromkeys(row["row"] for row in found)) == names
    peer = next(peer for peer in peers_of(points_of(path)) if peer.name == "AIConfigurator")
    assert {name for name in names if name in peer.seconds}
    for held in ("held out", "held out, experts"):
        assert scored["data"][held].keys() >= {"pagedsim", "AIConfigurator"}
    classes = {name for group in scored["data"]["held out"].values() for name in group}
    assert EXPERTS not in classes and EXPERTS in scored["data"]["held out, experts"]["pagedsim"]


def points_of(path: Path) -> list[Point]:
    return Points([(cell, scheduled(cell)) for cell in tables([str(path)], None)[0].cells]).all


def test_another_cost_model_is_named(own: Path, tmp_path: Path) -> None:
    cost = "cost=distserve-opt-13b-tp1"
    with pytest.raises(ConfigError, match="must be cost=roofline or cost=measured"):
        carried_out(tmp_path / "out", *TRUTH, cost, f"study.tables=[{own}]")


# -- constants -------------------------------------------------------------------------------------

OTHERWISE = {
    "vllm-0.2.launch_us": 400.0,
    "vllm-0.2.host_request_us": 150.0,
    "vllm-0.6.host_request_us": 20.0,
    "vllm-0.6.latencies": 3.0,
}


def measured_by(constants: Constants, rows: Rows) -> list[tuple[Cell, Schedule]]:
    """The rows, had a server been measured that is as these constants say."""
    found = []
    for cell, steps in rows:
        points = Points([(cell, steps)])
        seconds = points.predicted(constants.cost_of).tolist()
        measured = dict(zip(cell.measured, seconds, strict=True))
        found.append((replace(cell, measured=measured), steps))
    return found


@cache
def few() -> Sequence[tuple[Cell, Schedule]]:
    """Some rows of tables that take no time to plan."""
    by_name = {table.name: table.cells for table in tables(None, None)}
    batches = by_name["llm-inference-bench-a100"][::3]
    quick = [cell for cell in batches if cell.at_once * cell.output <= 1 << 13]
    return [(cell, scheduled(cell)) for cell in (*by_name["splitwise"], *quick)]


def test_a_fit_finds_the_constants_of_a_server_that_goes_by_them() -> None:
    standing = Constants.standing()
    fit = fitted(measured_by(standing.but(OTHERWISE), few()), standing, pull=1e-4)
    for name, value in OTHERWISE.items():
        assert fit.values[name] == pytest.approx(value, rel=0.05), name
        assert fit.deviations[name] < DECIDED


def test_what_no_row_tells_of_stays_where_it_begins_and_is_not_decided() -> None:
    """A server whose rows were all planned ahead hides its host behind the GPU."""
    rows = [(cell, steps._replace(ahead=~steps.ahead)) for cell, steps in few()]
    rows = [(replace(cell, stack="vllm-0.12"), steps) for cell, steps in rows]
    fit = fitted(rows, Constants.standing())
    assert fit.values["vllm-0.12.host_step_ms"] == pytest.approx(BEGIN["host_step_ms"], rel=0.2)
    assert fit.deviations["vllm-0.12.host_step_ms"] > DECIDED


# -- all tables ------------------------------------------------------------------------------------


def test_what_the_tables_decide_stands_as_it_is_fitted() -> None:
    """Rounded values; what the tables do not decide may be elsewhere."""
    constants = read_json(RESULTS / "truth" / RESULT)["data"]["constants"]
    decided = {name: of for name, of in constants.items() if of["deviation"] < DECIDED}
    assert decided
    for name, of in decided.items():
        assert of["stands"] == pytest.approx(of["fitted"], rel=0.05), name


def test_servers_held_out_are_within_the_limits_and_nearer_than_peers() -> None:
    """As the committed result says."""
    unseen = read_json(RESULTS / "truth" / RESULT)["data"]["held out"]
    for server in ("vllm", "sglang", "trtllm"):
        errors = unseen[f"pagedsim, {server}"]
        assert {name for name in errors if errors[name] > WITHIN.get(name, 1.0)} == set(), server
    peer = unseen["AIConfigurator"]
    assert all(unseen["pagedsim"][name] < peer[name] for name in peer)


# -- models of power and of all-to-all transfers against published measurements --------------------


PUBLISHED = [case for case in cases() if case.prompt <= power.LONGEST]


def test_the_constants_are_those_of_the_fit() -> None:
    found, have = fit(PUBLISHED, shipped().idle), shipped()
    assert (found.busy, found.compute, found.bandwidth) == pytest.approx(
        (have.busy, have.compute, have.bandwidth), abs=0.005
    )


def test_the_table_of_power_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    power.main([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 1 + 5 + 2
    (line,) = [line for line in lines if line.startswith("as shipped")]
    assert line.split()[2:6] == ["0.300", "1.170", "0.700", "36"]
