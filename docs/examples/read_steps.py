"""Reading steps.parquet: what a run did, step by step, as columns.

Every run of a study leaves this table. Each row is a step: its times, its work, the queues and the
memory. Without a folder, a short run is made first.

    python docs/examples/read_steps.py [outputs/<date>/<time>-<experiment>/runs/<arm>/seed-<n>]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.compute as pc
import pyarrow.parquet as pq


def made(folder: Path) -> Path:
    """A short run whose memory does not suffice."""
    words = [
        *("experiment=single", "seeds=1", "workload.requests=200", "workload.rate=10"),
        *("memory.blocks=600", "tracking=none", "report=false", f"hydra.run.dir={folder}"),
    ]
    command = [sys.executable, "-m", "pagedsim", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "runs" / "run" / "seed-0"


def main(run: Path) -> None:
    """Print what the columns come down to."""
    steps = pq.read_table(run / "steps.parquet")
    print("columns:", ", ".join(steps.column_names))
    seconds = pc.subtract(steps["end"], steps["start"])
    prefills = pc.greater(steps["prefill_tokens"], 0)
    for name, mask in (("with a prefill", prefills), ("decodes alone", pc.invert(prefills))):
        own = seconds.filter(mask)
        print(f"{name:15} {len(own):5} steps, {pc.mean(own).as_py() * 1e3:5.1f} ms on average")
    print(f"preempted: {pc.sum(steps['preempted'])}, most waiting: {pc.max(steps['waiting'])}")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else made(Path(folder) / "run"))
