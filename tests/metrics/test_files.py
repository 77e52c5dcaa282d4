from __future__ import annotations

import math
from pathlib import Path

import pytest

from pagedsim.metrics.files import read_summary, read_table, write_run
from pagedsim.metrics.summary import summarise
from tests.metrics.tables import REQUESTS, SIZES, STEPS, requests_of


def test_what_is_written_is_read(tmp_path: Path) -> None:
    summary = summarise(REQUESTS, STEPS, **SIZES)
    write_run(tmp_path / "new" / "run", REQUESTS, STEPS, summary)
    folder = tmp_path / "new" / "run"
    assert read_table(folder / "requests.parquet").equals(REQUESTS)
    assert read_table(folder / "steps.parquet").equals(STEPS)
    assert read_table(folder / "steps.parquet", "end", "step").equals(STEPS.select(["end", "step"]))
    assert read_summary(folder) == summary


@pytest.mark.parametrize("name", ["requests.parquet", "steps.parquet", "summary.json"])
def test_a_run_that_is_not_whole_has_no_summary(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, REQUESTS, STEPS, summarise(REQUESTS, STEPS, **SIZES))
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError):
        read_summary(tmp_path)
    file.unlink()
    with pytest.raises(OSError):
        read_summary(tmp_path)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, REQUESTS, STEPS, summarise(REQUESTS, STEPS, **SIZES))
    for name in ("requests.parquet", "steps.parquet", "summary.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_what_was_not_measured_is_null_on_disk(tmp_path: Path) -> None:
    requests = requests_of()
    write_run(tmp_path, requests, STEPS, summarise(requests, STEPS, **SIZES))
    assert '"ttft_mean": null' in (tmp_path / "summary.json").read_text()
    assert math.isnan(read_summary(tmp_path)["ttft_mean"])
