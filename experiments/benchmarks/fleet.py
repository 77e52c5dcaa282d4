"""What a request costs in a fleet, beside what it costs on one of its replicas.

    python -m experiments.benchmarks.fleet [--replicas 64] [--requests 1000000] [--routers ...]

Every replica gets as many requests a second as the one by itself, and as many in all: that is the
first line. Tables are made and written, as a study does. Each line is from a process of its own;
`of one` is its cost a request over that of the first line, and peak MB the most memory that it had.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.benchmarks.simulator import replica
from experiments.benchmarks.words import Parser, above_zero, at_least_one
from experiments.benchmarks.yardstick import timeout_seconds
from pagedsim.build import make_memory, make_router, make_scheduler
from pagedsim.fleet.member import Unit
from pagedsim.fleet.simulate import simulate_fleet
from pagedsim.metrics.files import write_run
from pagedsim.metrics.lanes import ReplicaFacts
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.summary import summarise
from pagedsim.sim.cost import Roofline
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload, synthetic

ROUTERS = ("round_robin", "random", "power_of_two", "least_requests")
BLOCKS, SEQUENCES = 7424, 256


def unit(index: int, cost: Roofline) -> Unit:
    """A replica like all others."""
    scheduler = make_scheduler(
        memory=make_memory(blocks=BLOCKS, block_size=16), max_seqs=SEQUENCES, max_model_len=4096
    )
    return Unit(f"replica-{index}", "both", scheduler, cost)


def facts(one: Unit) -> ReplicaFacts:
    """What a summary has of a replica."""
    return ReplicaFacts(one.name, BLOCKS, 16, SEQUENCES, hardware="a100-80gb")


def serve(router: str | None, replicas: int, workload: Workload) -> int:
    """A run with all its tables; returns the number of steps. Without a router: one server."""
    recorder, cost = Recorder(), Roofline(replica())
    units = [unit(index, cost) for index in range(replicas)]
    if router is None:
        simulate(units[0].scheduler, workload, cost, recorder)
    else:
        lanes = [recorder.lane() for _ in units]
        simulate_fleet(units, workload, make_router(router), lanes, recorder)
    requests, steps = recorder.requests_table(), recorder.steps()
    summary = summarise(
        requests,
        steps,
        total_blocks=replicas * BLOCKS,
        block_size=16,
        max_seqs=SEQUENCES,
        replicas=[facts(one) for one in units],
    )
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), requests, steps, summary)
    return steps.num_rows


def measure(router: str | None, replicas: int, requests: int, rate: float, one: float) -> None:
    """Print one line; `one`: the cost a request of one replica, 0: this is it."""
    lengths = {"shape": "fixed", "prompt": 154, "output": 312}
    serve(router, replicas, synthetic(requests=10, rate=rate, lengths=lengths))  # imports
    workload = synthetic(requests=requests, rate=rate * replicas, lengths=lengths)
    yardstick, begun = timeout_seconds(), time.process_time()
    steps = serve(router, replicas, workload)
    each = (time.process_time() - begun) / requests
    yardstick = (yardstick + timeout_seconds()) / 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{router or 'one by itself':16} {replicas:8,} {requests:10,} {steps:11,} "
        f"{each * 1e6:11.1f} {each / yardstick:9.1f} {each / one if one else 1:7.2f} {peak:8,.0f}",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=at_least_one, default=64)
    parser.add_argument(
        "--requests", type=at_least_one, default=1_000_000, help="of the whole fleet"
    )
    parser.add_argument("--rate", type=above_zero, default=13.0, help="requests/s of each replica")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=ROUTERS)
    parser.add_argument("--line", nargs=3, metavar="WHAT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.line:
        router, replicas, one = options.line
        count = options.requests if router != "-" else options.requests // options.replicas
        measure(
            router if router != "-" else None,
            int(replicas),
            max(count, 1),
            options.rate,
            float(one),
        )
        return
    print(
        f"{'router':16} {'replicas':>8} {'requests':>10} {'steps':>11} {'µs/request':>11} "
        f"{'timeouts':>9} {'of one':>7} {'peak MB':>8}",
        flush=True,
    )
    one = _line("-", 1, 0.0, options)
    for router in options.routers:
        _line(router, options.replicas, one, options)


def _line(router: str, replicas: int, one: float, options: argparse.Namespace) -> float:
    """One line, from a process of its own; returns its microseconds a request, as seconds."""
    words: Sequence[str] = [
        *(sys.executable, "-m", "experiments.benchmarks.fleet"),
        *("--requests", str(options.requests), "--replicas", str(options.replicas)),
        *("--rate", str(options.rate), "--line", router, str(replicas), str(one)),
    ]
    said = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(said, end="", flush=True)
    return 1e-6 * float(said.split()[-4].replace(",", ""))


if __name__ == "__main__":
    main()
