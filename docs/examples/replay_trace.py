"""Replaying a trace: the requests of a CSV file, as they came and twice as fast.

The file is made up here. A trace of your own needs the same three columns; conf/workload/trace.yaml
lists the other formats that are read.

    python docs/examples/replay_trace.py [trace.csv]
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hydra.utils import instantiate
from omegaconf import OmegaConf

from pagedsim.build import make_memory, make_scheduler
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.summary import summarise
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.workload import trace


def made_up(path: Path) -> Path:
    """Two hundred requests in bunches of ten, written to `path`."""
    rows = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    rows += [f"{8 * (i // 10)},{100 + 37 * i % 900},{50 + 23 * i % 400}" for i in range(200)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def main(path: Path) -> None:
    """Print a line for each speed."""
    replica = Replica(
        instantiate(OmegaConf.load("conf/model/llama-2-7b.yaml")),
        instantiate(OmegaConf.load("conf/hardware/a100-80gb.yaml")),
    )
    for faster in (1, 2):
        workload = trace(path=str(path), rate_scale=faster)
        scheduler = make_scheduler(memory=make_memory(blocks=2000))
        recorder = Recorder()
        simulate(scheduler, workload, Roofline(replica), recorder)
        requests, steps = recorder.requests_table(), recorder.steps_table()
        found = summarise(requests, steps, total_blocks=2000, block_size=16, max_seqs=256)
        print(
            f"{faster} × the trace's rate: {len(workload)} requests, TTFT P99 "
            f"{found['ttft_p99'] * 1e3:,.0f} ms, makespan {found['makespan']:.0f} s"
        )


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        given = Path(sys.argv[1]) if len(sys.argv) > 1 else made_up(Path(folder) / "trace.csv")
        main(given)
