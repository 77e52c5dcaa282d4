from __future__ import annotations

import math
from pathlib import Path

from pagedsim.metrics.files import read_run, write_run
from pagedsim.metrics.summary import summarise
from tests.metrics.tables import REQUESTS, SIZES, STEPS, requests_of


def test_what_is_written_is_read(tmp_path: Path) -> None:
    summary = summarise(REQUESTS, STEPS, **SIZES)
    write_run(tmp_path / "new" / "run", REQUESTS, STEPS, summary)
    records = read_run(tmp_path / "new" / "run")
    assert records.requests.equals(REQUESTS)
    assert records.steps.equals(STEPS)
    assert records.summary == summary


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, REQUESTS, STEPS, summarise(REQUESTS, STEPS, **SIZES))
    for name in ("requests.parquet", "steps.parquet", "summary.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_what_was_not_measured_is_null_on_disk(tmp_path: Path) -> None:
    requests = requests_of()
    write_run(tmp_path, requests, STEPS, summarise(requests, STEPS, **SIZES))
    assert '"ttft_mean": null' in (tmp_path / "summary.json").read_text()
    assert math.isnan(read_run(tmp_path).summary["ttft_mean"])
