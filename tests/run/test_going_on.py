"""At the front door: folders of other studies, and many studies in one command."""

from __future__ import annotations

import csv
from pathlib import Path

from experiments.studies.compare import Compare
from experiments.studies.hit_rate import HitRate
from tests.conftest import Call

QUICK = ("experiment=single", "workload.requests=10", "workload.rate=20", "seeds=1", "jobs=1")


def test_a_study_of_another_kind_wants_another_folder(tmp_path: Path, call: Call) -> None:
    call(*QUICK, "tracking=none", "report=false", "hydra.run.dir=out")
    tables = sorted(Path("out/runs").rglob("*.parquet"))
    words = ("workload.requests=10", "workload.rate=20", "seeds=1", "workload=sharegpt")
    own = ("+workload.prefixes={tokens: 64}", "tracking=none", "hydra.run.dir=out")
    code, _, errors = call("experiment=hit_rate", *words, *own)
    assert code == 1
    assert f"study._target_={Compare.__module__}.Compare, not {HitRate.__module__}" in errors
    assert sorted(Path("out/runs").rglob("*.parquet")) == tables and tables


def test_several_studies_without_tables_say_what_each_found(call: Call) -> None:
    words = ("experiment=estimate", "model=tiny", "hardware=a10,h100", "hydra.sweep.dir=out")
    code, out, _ = call("-m", *words, "hydra/launcher=basic")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("job ")]
    assert lines[0].startswith("job 0 (hardware=a10): tiny on a10: ")
    assert lines[1].startswith("job 1 (hardware=h100): tiny on h100: ")
    assert "results   out" in out


def test_a_study_that_goes_on_tells_the_same_bytes(call: Call) -> None:
    words = ("experiment=fcfs_vs_priority", "workload.requests=60", "seeds=2", "report=false")
    call(*words, "tracking=none", "hydra.run.dir=out")
    first = Path("out/comparison.csv").read_bytes()
    code, out, _ = call(*words, "tracking=none", "hydra.run.dir=out")
    assert code == 0 and "4 of 4 runs were there already" in out
    assert Path("out/comparison.csv").read_bytes() == first


def test_a_percentile_that_is_named_later_is_in_the_table(call: Call) -> None:
    words = (*QUICK, "tracking=none", "report=false", "hydra.run.dir=out")
    assert call(*words, "study.metrics=[ttft]")[0] == 0
    more = "study.metrics=[ttft,ttft_p95,e2e_p99.9]"
    for there in (False, True):
        code, out, _ = call(*words, more)
        assert code == 0
        assert ("there already" in out) == there
        with Path("out/comparison.csv").open() as file:
            found = {row["metric"]: float(row["mean"]) for row in csv.DictReader(file)}
        assert found["ttft_mean"] < found["ttft_p95"] <= found["ttft_p99"]
        assert found["e2e_p99_9"] > found["ttft_p99"]


def test_what_is_no_percentile_is_refused_before_anything_runs(call: Call) -> None:
    code, _, errors = call(*QUICK, "tracking=none", "study.metrics=[ttft_p950]")
    told = "study.metrics: unknown metric 'ttft_p950': percentiles are from p0 to p100"
    assert (code, errors.strip()) == (1, f"pagedsim: {told}")
