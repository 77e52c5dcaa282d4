"""What is recorded of steps and requests, how little room that takes, and the files of a run."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import ConfigError, Request, Scheduler
from pagedsim.metrics.files import read_summary, read_table, write_run
from pagedsim.metrics.recorder import PACKED, Recorder
from pagedsim.metrics.summary import summarise
from pagedsim.run.folder import full_disk_named
from pagedsim.sim.simulate import simulate
from tests.metrics.tables import REQUESTS, SIZES, STEPS
from tests.sim.harness import Constant, Jobs


def scheduler() -> Scheduler:
    return make_scheduler(memory=make_memory(blocks=64, block_size=4))


@pytest.mark.parametrize("ids", [[3, 1, 2], ["c", "a", "b"]])
def test_requests_stand_in_the_order_of_their_ids(ids: list[int | str]) -> None:
    recorder = Recorder()
    for number, name in enumerate(ids):
        recorder.left(Request(name, 10 + number, client=f"of {name}"))
    rows = recorder.requests_table().to_pylist()
    assert [row["request"] for row in rows] == sorted(ids, key=str)
    assert [row["prompt_tokens"] for row in rows] == [11, 12, 10]
    assert [row["client"] for row in rows] == [f"of {name}" for name in sorted(ids, key=str)]
    assert {row["state"] for row in rows} == {"unfinished"}
    assert {row["service"] for row in rows} == {0.0}


def served(requests: int) -> Recorder:
    """So many requests of 40 tokens, one after the other, each planned afresh."""
    recorder = Recorder()
    jobs = Jobs([(50.0 * i, 4, 40) for i in range(requests)])
    simulate(scheduler(), jobs, Constant(), recorder, fast_forward=False)
    return recorder


def test_parts_are_made_one_at_a_time() -> None:
    """A run's steps may be more than there is room for, unfolded."""
    steps = served(4 * PACKED // 40).own_steps()
    whole = pa.Table.from_batches(steps.to_batches()).nbytes
    tracemalloc.start()
    for part in steps.to_batches(PACKED // 16):
        assert part.nbytes < whole / 60
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < whole / 10


def test_a_column_of_ones_own_stands_beside_the_others() -> None:
    steps = served(2).own_steps()
    steps = steps.append_column("wall", pa.array(range(steps.num_rows)))
    parts = pa.Table.from_batches(steps.to_batches(7))
    assert parts["wall"].to_pylist() == parts["step"].to_pylist()
    assert parts.schema == steps.schema


# -- files -----------------------------------------------------------------------------------------


def test_files_are_read_as_written(tmp_path: Path) -> None:
    summary = summarise(REQUESTS, STEPS, **SIZES)
    write_run(tmp_path / "new" / "run", REQUESTS, STEPS, summary)
    folder = tmp_path / "new" / "run"
    assert read_table(folder / "requests.parquet").equals(REQUESTS)
    assert read_table(folder / "steps.parquet").equals(STEPS)
    assert read_table(folder / "steps.parquet", "end", "step").equals(STEPS.select(["end", "step"]))
    assert read_summary(folder) == summary
    write_run(tmp_path / "again", REQUESTS, STEPS, summary)
    for name in ("requests.parquet", "steps.parquet", "summary.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("name", ["requests.parquet", "steps.parquet", "summary.json"])
def test_a_full_disk_is_reported_with_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    text = re.escape(f"{tmp_path}: cannot be written: No space left on device")
    with pytest.raises(ConfigError, match=text), full_disk_named(tmp_path):
        write_run(tmp_path, REQUESTS, STEPS, summarise(REQUESTS, STEPS, **SIZES))


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
