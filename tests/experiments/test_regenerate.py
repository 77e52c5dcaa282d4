"""Committed findings are what their commands give, and every experiment leaves what --help says."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from pagedsim.experiments import regenerate
from pagedsim.experiments.fidelity import validate
from pagedsim.experiments.fidelity.truth_data import LOGS
from pagedsim.experiments.regenerate import RESULTS, STUDIES, committed, index, keep, run
from pagedsim.fidelity import step_grid
from pagedsim.metrics.files import RESULT, write_json
from pagedsim.run.help import Experiment
from tests.experiments.differing import differing
from tests.run.studies import EXPERIMENTS, carried_out

ALWAYS = {"config.yaml", "result.json", "comparison.csv", "report.html", "plots"}


def check_leaves(folder: Path, one: Experiment) -> None:
    """Fail unless it is all there, whole, and nothing that --help does not tell of."""
    left = {path.name for path in folder.iterdir()} - {"wandb"}
    keeps_tables = one.kind.asks and one.kind.keeps_tables
    tables = {"runs", "timeline.json"} if keeps_tables else {"runs"} if one.kind.asks else set()
    assert (
        left - {"cost.json", "fit.json", "table.tex"} - {name for name in left if "=" in name}
        == ALWAYS | tables
    )
    if "table.tex" in left:
        assert keeps_tables and (folder / "table.tex").read_text().startswith(r"\begin{tabular}")
    result = json.loads((folder / "result.json").read_text())
    assert result["experiment"] == one.name and result["finding"] and result["title"]
    with (folder / "comparison.csv").open() as file:
        assert all(row.values() for row in csv.DictReader(file))
    page = (folder / "report.html").read_text()
    assert result["finding"][0].split()[0] in page and "To run it again" in page
    for name in result["pictures"]:
        assert (folder / "plots" / f"{name}.png").stat().st_size > 0
    if keeps_tables:
        runs = list((folder / "runs").glob("*/seed-*"))
        assert runs
        for run in runs:
            assert {"requests.parquet", "steps.parquet", "summary.json", "run.json"} <= {
                path.name for path in run.iterdir()
            }
        assert json.loads((folder / "timeline.json").read_text())["traceEvents"]


# -- committed results -----------------------------------------------------------------------------

QUICK = ("fcfs_vs_priority",)
"""Studies that take a few seconds."""


def test_the_index_is_of_what_is_there() -> None:
    assert (RESULTS / "README.md").read_text() == index(committed())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in STUDIES
        if name in committed()
    ],
)
def test_a_result_comes_out_again(name: str, tmp_path: Path) -> None:
    if name in regenerate.TRACED and not Path("traces").is_dir():
        pytest.skip("there is no traces/")
    made = run(name, tmp_path / "run")
    (kind,) = (one for one in EXPERIMENTS if one.name == name)
    check_leaves(made, kind)
    folders = (tmp_path / "again" / name, RESULTS / name)
    keep(made, folders[0])
    again, kept = (json.loads((at / RESULT).read_text(encoding="utf-8")) for at in folders)
    assert not differing(again, kept)
    others = ({path.name for path in at.iterdir()} for at in folders)
    assert next(others) == next(others)
    if name in regenerate.RECORDS:
        rows, committed_rows = map(rows_of, folders)
        assert not differing(rows, committed_rows)


def rows_of(folder: Path) -> list[dict[str, str | float]]:
    """What is kept of comparison.csv."""
    with gzip.open(folder / "comparison.csv.gz", "rt", encoding="utf-8") as file:
        return [{name: number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def test_rates_that_were_found_give_the_change_beside_them() -> None:
    data = json.loads((RESULTS / "capacity" / RESULT).read_text(encoding="utf-8"))["data"]
    rates = {arm: of["requests_per_s"]["mean"] for arm, of in data["arms"].items()}
    changes = {arm: of["against_baseline"]["mean"] for arm, of in data["arms"].items()}
    baseline = rates.pop(data["baseline"])
    assert rates
    for arm, rate in rates.items():
        assert rate / baseline == pytest.approx(changes[arm], rel=1e-5)


def test_a_kept_result_is_that_of_the_run_without_its_commit(tmp_path: Path) -> None:
    """Byte by byte: numbers, missing ones and names are written as before."""
    data = {"pictures": [], "data": {"a": [1, 0.1, -0.0, 1e-7, float("nan")], "é": "×"}}
    made, again = tmp_path / "made", tmp_path / "again"
    made.mkdir()
    write_json(made / RESULT, {**data, "pagedsim": {"version": "1", "commit": "abc"}})
    keep(made, again)
    write_json(tmp_path / RESULT, data)
    assert (again / RESULT).read_bytes() == (tmp_path / RESULT).read_bytes()


def test_an_unknown_study(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        regenerate.main(["paper_fig99"])
    assert "paper_fig99: must be one of paper_fig2, " in capsys.readouterr().err


# -- every experiment ------------------------------------------------------------------------------

FEW = ("workload.requests=40", "seeds=1")
ENGINE = ("backend=engine", "backend.clock=cpu", "backend.cache_tokens=128", "backend.shrink=1")
LENGTHS = {"prompt_min": 1, "prompt_max": 24, "output_min": 2, "output_max": 8}
SHORT = (
    *("workload.max_len=40", "workload.lengths.shape=uniform"),
    *(f"+workload.lengths.{name}={value}" for name, value in LENGTHS.items()),
)
VALIDATED = (
    *(*ENGINE, *SHORT, "study.repeats=1", "study.seconds=0.1"),
    *(f"study.calibration.{one}.workload.requests=8" for one in ("few", "some", "many")),
    *(
        f"study.calibration.{one}.workload.lengths.{name}={value}"
        for one in ("few", "some", "many")
        for name, value in LENGTHS.items()
    ),
)
RTX4090 = LOGS / "vllm-0.19-rtx4090-llama-3.1-8b.csv"
SMALLEST: dict[str, tuple[str, ...]] = {
    "bench": ("workload=alpaca", "workload.requests=8", "workload.rate=100"),
    "calibrate": ENGINE,
    "compare": (*FEW, "study.arms={a: ['policy=fcfs'], b: ['policy=priority']}"),
    "estimate": (),
    "hit_rate": ("workload=sharegpt", *FEW, "+workload.prefixes={tokens: 64}", "memory.blocks=900"),
    "load_curves": (*FEW, "study.values=[1,2]"),
    "parity": (*VALIDATED, "study.over=['policy=fcfs']"),
    "predict": (
        *(f"fit={RESULTS / 'rtx4090'}", f"requests={RTX4090}", "model=llama-3.1-8b"),
        *("hardware=rtx4090", "batching=unified", "memory=prefix", "memory.blocks=2588"),
        "server.max_batched_tokens=2048",
    ),
    "record": (*FEW, *ENGINE, *SHORT),
    "replay": (),
    "single": FEW,
    "sweep": (*FEW, "study.over=server.max_seqs", "study.values=[8,16]"),
    "validate": VALIDATED,
}
"""The least of each that says something. A new experiment without a committed result wants a line
here; the others are run whole above, with a check of what they leave."""
SMALL = [one for one in EXPERIMENTS if one.name not in committed()]


@pytest.mark.slow
@pytest.mark.parametrize("one", SMALL, ids=lambda one: one.name)
def test_it_leaves_what_the_manual_says(
    one: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    words = SMALLEST[one.name]
    if ENGINE[0] in words or one.name == "replay":
        pytest.importorskip("torch")
        request.getfixturevalue("a_small_model")
        monkeypatch.setattr(validate, "FEWEST", 4)
        monkeypatch.setattr(step_grid, "ROUNDS", 1)
    if one.name == "replay":
        carried_out(tmp_path / "recorded", "experiment=record", *SMALLEST["record"])
        words = (f"run={tmp_path / 'recorded'}",)
    if one.name == "bench":
        words = (*words, f"backend.url={request.getfixturevalue('fake').url}")
    folder = tmp_path / "out"
    carried_out(folder, f"experiment={one.name}", "report=true", "tracking=wandb", *words)
    check_leaves(folder, one)


def test_every_other_experiment_has_its_least() -> None:
    assert {one.name for one in SMALL} == SMALLEST.keys()
