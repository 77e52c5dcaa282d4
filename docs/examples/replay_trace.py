"""Replaying a trace: the requests of a CSV file, as they came and twice as fast.

The file is made up here. A trace of your own needs the same three columns; conf/workload/trace.yaml
lists the other formats that are read.

    python docs/examples/replay_trace.py [trace.csv]
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pagedsim as ps


def made_up(path: Path) -> Path:
    """Two hundred requests in bunches of ten, written to `path`."""
    rows = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    rows += [f"{8 * (i // 10)},{100 + 37 * i % 900},{50 + 23 * i % 400}" for i in range(200)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def main(path: Path) -> None:
    """Print a line for each speed."""
    speeds = {"the trace's rate": 1, "twice as fast": 2}
    workload = {name: ps.trace(path, rate_scale=faster) for name, faster in speeds.items()}
    for run in ps.compare({"memory.blocks": 2000}, workload=workload).runs:
        ttft, makespan = 1e3 * run.summary["ttft_p99"], run.summary["makespan"]
        print(f"{run.arm:16}  TTFT P99 {ttft:7,.0f} ms, makespan {makespan:.0f} s")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        given = Path(sys.argv[1]) if len(sys.argv) > 1 else made_up(Path(folder) / "trace.csv")
        main(given)
