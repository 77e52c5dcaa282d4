"""The table at the end of a sweep, on terminals of any width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pagedsim.run.multirun import _tables

METRICS = ("ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean", "output_tokens_per_s")
ROWS: list[dict[str, Any]] = [
    {
        **{"job": job, "server.max_seqs": str(8 << job), "workload.rate": "1.25"},
        **dict.fromkeys(METRICS, 1234.5678 * (job + 1)),
    }
    for job in range(3)
]


def printed(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in _tables(ROWS, ["server.max_seqs", "workload.rate"], width):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_cell_is_cut_and_no_metric_left_out(width: int) -> None:
    wide, here = printed(300), printed(width)
    assert "…" not in here
    assert max(map(len, here.splitlines())) <= width
    cells = {word for word in wide.split() if any(sign.isalnum() for sign in word)}
    assert cells <= set(here.split())
    assert here.count("rate") == here.count("max_seqs") >= 1  # each part says whose rows they are
