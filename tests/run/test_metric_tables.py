"""Metrics of recorded tables, which the parameters of their functions name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagedsim as ps
from pagedsim.metrics.files import read_table
from pagedsim.metrics.metric import LESS, OF_RUN
from pagedsim.metrics.recorder import TABLES, Recorder
from tests.run.http.fake import Fake

pytestmark = pytest.mark.usefixtures("registries")

SMALL: dict[str, Any] = {"seeds": 1, "jobs": 1, "policy": "priority"}
TWO_CLIENTS = ps.option("chat_and_batch", requests=120, rate=12.0)
FLEET = {
    "prefill": {"replicas": 1, "role": "prefill"},
    "decode": {"replicas": 2, "role": "decode"},
}


def rows_of(name: str) -> None:
    """Define the metric `rows_of_NAME`."""
    text = f"def rows_of_{name}({name}): return len({name})"
    names: dict[str, Any] = {"__name__": __name__}
    exec(text, names)
    ps.metric("Rows", "count", LESS)(names[f"rows_of_{name}"])


def test_the_tables_of_the_recorder_are_listed() -> None:
    made = {name.removesuffix("_table") for name in dir(Recorder) if name.endswith("_table")}
    assert made == TABLES.keys()


def test_every_recorded_table_is_read_by_its_name() -> None:
    columns = {name: table(Recorder()).schema.names for name, table in TABLES.items()}
    assert OF_RUN - {"replicas", "run"} == {
        name for name, there in columns.items() if "request" not in there
    }
    for name in (*TABLES, "replicas"):
        rows_of(name)
    server = {"max_seqs": 64}
    workload = ps.synthetic(rate=30.0, requests=120)
    result = ps.fleet(
        FLEET, {"fleet.link.bandwidth_gb_s": 20, "memory.blocks": 150},
        server=server, workload=workload, **SMALL,
    )  # fmt: skip
    (run,) = result.runs
    assert run.summary["rows_of_replicas"] == 3
    for name in TABLES:
        rows = read_table(run.folder / f"{name}.parquet").num_rows
        assert run.summary[f"rows_of_{name}"] == rows > 0, name
    sent = run.events("transfers").to_pydict()
    assert len(sent["request"]) == run.summary["transfers"]["transfers"]
    assert set(sent["source"]) == {0} and set(sent["target"]) == {1, 2} and all(sent["arrived"])
    assert sum(sent["bytes"]) == pytest.approx(run.summary["transfers"]["bytes"])
    spans = np.subtract(sent["end"], sent["start"])
    assert spans.sum() == pytest.approx(run.summary["transfers"]["seconds"])


def resumption() -> None:
    @ps.metric.distribution("Resumption")
    def resumption(preemptions: Any) -> Any:
        return preemptions["back_at"] - preemptions["time"]


def test_a_distribution_of_events_has_percentiles_and_a_value_for_each_client() -> None:
    resumption()
    result = ps.compare(
        {"study.metrics": ["resumption_p95"], "memory.blocks": 400},
        preemption={"recompute": "recompute", "swap": "swap"},
        workload=TWO_CLIENTS,
        **SMALL,
    )
    assert set(result.table()["metric"].to_pylist()) == {"resumption_p95"}
    client = {row["request"]: row["client"] for row in result.requests.to_pylist()}
    for run in result.runs:
        rows = run.events().to_pylist()
        spans = np.array([row["back_at"] - row["time"] for row in rows])
        assert len(spans) > 2
        assert run.summary["resumption_p95"] == pytest.approx(np.nanpercentile(spans, 95))
        for name, numbers in run.summary["clients"].items():
            own = spans[[client[row["request"]] == name for row in rows]]
            expected = np.nanmean(own) if len(own) else np.nan
            assert numbers["resumption_mean"] == pytest.approx(expected, nan_ok=True)


def test_a_metric_of_steps_is_of_the_run_alone() -> None:
    @ps.metric("Blocks", "count", LESS)
    def most_blocks(steps: Any, requests: Any, factor: int = 2) -> int:
        assert len(requests["request"]) == 120
        return factor * int(steps["used_blocks"].max())

    result = ps.simulate(workload=TWO_CLIENTS, **SMALL)
    (run,) = result.runs
    assert run.summary["most_blocks"] == 2 * max(result.steps["used_blocks"].to_pylist())
    assert not any("most_blocks" in one for one in run.summary["clients"].values())


def test_without_events_a_distribution_is_unknown_and_without_a_table_there_is_none() -> None:
    resumption()
    rows_of("replicas")
    result = ps.simulate(
        {"study.metrics": ["ttft_mean", "resumption_p95"]},
        workload=ps.synthetic(rate=1.0, requests=20),
        **SMALL,
    )
    assert np.isnan(result.runs[0].summary["resumption_p95"])
    assert "rows_of_replicas" not in result.runs[0].summary
    assert "no run has a value of Resumption P95" in result.notes


def test_a_server_over_http_has_no_table_but_that_of_requests(fake: Fake) -> None:
    resumption()
    rows_of("steps")
    rows_of("requests")
    result = ps.simulate(
        {"study.metrics": ["ttft_mean", "resumption_p95"]},
        backend=ps.option("http", url=fake.url),
        workload=ps.option("fixed", requests=8, rate=400.0, lengths={"prompt": 9, "output": 3}),
        seeds=1,
    )
    summary = result.runs[0].summary
    assert summary["rows_of_requests"] == 8
    assert not {"resumption_p95", "resumption_mean", "rows_of_steps"} & summary.keys()
    note = "no run has a value of Resumption P95: a server over HTTP shows requests alone"
    assert note in result.notes


def test_the_engine_records_the_same_tables() -> None:
    pytest.importorskip("torch")
    resumption()
    for name in TABLES:
        rows_of(name)
    result = ps.simulate(
        {"study.metrics": ["resumption_p95"], "memory.blocks": 14},
        backend="engine",
        workload=ps.option(
            "fixed", requests=6, rate=1000.0, lengths={"prompt": 200, "output": 200}
        ),
        seeds=1,
    )
    summary = result.runs[0].summary
    assert summary["resumption_p95"] > 0
    assert summary["rows_of_preemptions"] == len(result.events) > 0
    assert summary["rows_of_steps"] == len(result.steps) and summary["rows_of_transfers"] == 0


def test_an_unknown_column_is_named() -> None:
    @ps.metric("A", "count", LESS)
    def unknown_column(preemptions: Any) -> Any:
        return preemptions["back"].max()

    notes = ps.simulate(workload=ps.synthetic(requests=3), **SMALL).notes
    (note,) = (note for note in notes if "unknown_column" in note)
    line = "metric unknown_column failed: KeyError: \"preemptions have no column 'back'; did you "
    assert note.startswith(line) and "\n" not in note
