"""What many requests take, as a study runs them: simulated, tables made, summarised and written.

    python -m experiments.benchmarks.scale [--requests 1000 10000 100000 1000000]

A server that is saturated, one that is busy, and one with little to do, which takes the most steps.
The cost of a request should be the same whatever their number; a million must fit into 1.5 GB.
Each line is from a process of its own; peak MB is the most memory that it had.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.benchmarks.simulator import Case, replica, run, short
from experiments.benchmarks.words import Parser, at_least_one
from experiments.benchmarks.yardstick import seconds, timeout_seconds
from pagedsim.metrics.files import write_run
from pagedsim.metrics.summary import summarise
from pagedsim.sim.cost.work import total_work
from pagedsim.workload import Workload

LOADS = {
    "saturated": (154, 312, 1000.0),
    "busy": (154, 312, 13.0),
    "calm": (30, 20, 8.0),
}
"""Tokens in and out, and requests a second."""


def serve(case: Case, workload: Workload) -> int:
    """All that a study does with one run, but for its report; returns the number of steps."""
    recorder = run(case, workload)
    requests, steps = recorder.requests_table(), recorder.steps()
    hardware, work = replica().hardware, total_work(replica(), steps)
    summary = summarise(
        requests,
        steps,
        total_blocks=case.blocks,
        block_size=16,
        max_seqs=case.max_seqs,
        flops=work.flop,
        bytes=work.bytes,
        peak_flops=hardware.flop_rate,
        peak_bandwidth=hardware.bandwidth,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), requests, steps, summary)
    return steps.num_rows


def measure(load: str, requests: int) -> None:
    """Print one line."""
    case = short(requests, *LOADS[load])
    workload = case.workload()
    few = short(10, *LOADS[load])
    serve(few, few.workload())  # imports what is imported when it is needed
    yardstick = timeout_seconds()
    found: list[int] = []
    each = seconds(lambda: found.append(serve(case, workload))) / requests
    yardstick = (yardstick + timeout_seconds()) / 2  # a long run may see the machine change
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{load:10} {case.name:24} {requests:10,} {found[0]:11,} {each * requests:8.2f} "
        f"{each * 1e6:11.1f} {each / yardstick:9.1f} {peak:8,.0f}",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = Parser(description=__doc__.splitlines()[0])
    numbers = [1_000, 10_000, 100_000, 1_000_000]
    parser.add_argument("--requests", type=at_least_one, nargs="+", default=numbers)
    parser.add_argument("--load", choices=LOADS, help="only this one, in this process")
    options = parser.parse_args()
    if options.load:
        for requests in options.requests:
            measure(options.load, requests)
        return
    print(
        f"{'load':10} {'requests':24} {'number':>10} {'steps':>11} {'seconds':>8} "
        f"{'µs/request':>11} {'timeouts':>9} {'peak MB':>8}",
        flush=True,
    )
    here = [sys.executable, "-m", "experiments.benchmarks.scale"]
    for load in LOADS:
        for requests in options.requests:
            subprocess.run([*here, "--load", load, "--requests", str(requests)], check=True)


if __name__ == "__main__":
    main()
