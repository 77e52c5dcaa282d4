"""The simulator beside Vidur (github.com/microsoft/vidur): the same trace, in turns, in one run.

    python -m experiments.benchmarks.vidur --vidur FOLDER --python FOLDER/.venv/bin/python \\
        --trace conv_poisson_4.5rps_10000.csv

FOLDER is a checkout of Vidur, and the interpreter one that has what its README asks for. Both
simulate Llama-2-7B on one A100 with 7,424 blocks of 16 tokens and at most 128 requests at once, in
the manner of vLLM: prefill goes first. Neither writes plots, and Vidur no metrics. Options that are
not known here are Vidur's. Before the first round it runs once for itself, since it learns to
predict the time of a step and keeps what it has learnt.

Times are the processor's, with those of child processes, and once more for the simulation alone,
without imports, files and settings; ours is with a record of each step and request.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from experiments.benchmarks.simulator import conversation, run
from experiments.benchmarks.words import Parser, at_least_one, existing
from experiments.benchmarks.yardstick import Cost, add, timeout_seconds
from pagedsim.run.compilation import built

CHILD = Path(__file__).with_name("vidur_child.py")
QUIET = (
    *("write_metrics", "store_plots", "enable_chrome_trace", "store_request_metrics"),
    *("store_batch_metrics", "store_utilization_metrics"),
)
"""What of Vidur is turned off."""
HOME = Path(__file__).parents[2]


class Told(NamedTuple):
    """What Vidur said of a simulation."""

    seconds: float
    batches: int
    simulated: float


def words_of(trace: Path, more: Sequence[str]) -> list[str]:
    """Vidur's settings."""
    return [
        *("--request_generator_config_type", "trace_replay"),
        *("--trace_request_generator_config_trace_file", str(trace)),
        *("--replica_config_model_name", "meta-llama/Llama-2-7b-hf"),
        *("--replica_config_device", "a100"),
        *("--replica_scheduler_config_type", "vllm", "--vllm_scheduler_config_block_size", "16"),
        *("--vllm_scheduler_config_batch_size_cap", "128"),
        *("--vllm_scheduler_config_num_blocks", "7424"),
        *(f"--no-metrics_config_{name}" for name in QUIET),
        *more,
    ]


def command(words: Sequence[str], folder: Path, more: Mapping[str, str]) -> tuple[float, str]:
    """Processor seconds of a command with all its processes, and what it said."""
    before = _used()
    done = subprocess.run(
        words, cwd=folder, env=os.environ | dict(more), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr[-2000:]}\n{words[0]} failed")
    return _used() - before, done.stdout


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def vidur(folder: Path, python: Path, words: Sequence[str]) -> tuple[float, Told]:
    """Its whole command, and its simulation."""
    alone = {"WANDB_MODE": "disabled", "PYTHONPATH": ""}
    took, said = command([str(python), str(CHILD), *words], folder, alone)
    (times,) = (one for one in said.splitlines() if one.startswith("loop "))
    values = times.split()[1::2]
    return took, Told(float(values[0]), int(values[1]), float(values[2]))


def ours(trace: Path) -> float:
    """Our whole command."""
    with TemporaryDirectory() as folder:
        words = (
            *(sys.executable, "-m", "pagedsim", "experiment=single", "model=llama-2-7b"),
            *("hardware=a100-80gb", "memory.blocks=7424", "server.max_seqs=128", "report=false"),
            *("tracking=none", "workload=trace", f"workload.path={trace}", "seeds=1"),
            f"hydra.run.dir={folder}",
        )
        return command(words, HOME, {})[0]


def line(name: str, cost: Cost, requests: int, base: Cost | None) -> str:
    """A row of the table."""
    times = f"{min(cost.timeouts) / min(base.timeouts):.1f}" if base else "1.0"
    return f"| {' | '.join([name, *cost.cells(2, requests), times])} |"


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--vidur", type=Path, required=True, help="a checkout of Vidur")
    parser.add_argument("--python", type=Path, required=True, help="the interpreter that runs it")
    parser.add_argument(
        "--trace",
        type=lambda text: Path(existing(text)),
        required=True,
        help="its columns are Vidur's own",
    )
    parser.add_argument("--rounds", type=at_least_one, default=3)
    asked, more = parser.parse_known_args(words)
    asked.trace = Path(asked.trace)
    for name in ("vidur/main.py", "data/profiling"):
        if not (asked.vidur / name).exists():
            parser.error(f"--vidur {asked.vidur}: no checkout of Vidur, it has no {name}")
    for name, path in (("--python", asked.python), ("--trace", asked.trace)):
        if not path.is_file():
            parser.error(f"{name} {path}: no such file")
    trace, python = asked.trace.resolve(), asked.python.absolute()
    start = partial(vidur, asked.vidur.resolve(), python, words_of(trace, more))
    first, _ = start()
    case = conversation(str(trace), None)
    workload = case.workload()
    costs = {name: Cost([], []) for name in ("ours", "Vidur's", "our", "its")}
    for _ in range(asked.rounds):
        add(costs["ours"], partial(run, case, workload))
        yardstick = timeout_seconds()
        whole, told = start()
        own = ours(trace)
        yardstick = (yardstick + timeout_seconds()) / 2
        for name, took in (("Vidur's", told.seconds), ("our", own), ("its", whole)):
            costs[name].seconds.append(took)
            costs[name].timeouts.append(took / yardstick)
    steps = run(case, workload).steps_table().num_rows
    print(f"{len(workload):,} requests; pagedsim is {built()}: {steps:,} steps")
    print(f"Vidur: {told.batches:,} batches, {told.simulated:,.0f} s simulated; ", end="")
    print(f"the first run, with what it learnt, took {first:.0f} s\n")
    print("| | seconds | lowest | timeouts a request | lowest | × |")
    print("|---" * 6 + "|")
    requests = len(workload)
    print(line("pagedsim, the simulation alone", costs["ours"], requests, None))
    print(line("Vidur, the simulation alone", costs["Vidur's"], requests, costs["ours"]))
    print(line("pagedsim, the whole command", costs["our"], requests, None))
    print(line("Vidur, the whole command", costs["its"], requests, costs["our"]))


if __name__ == "__main__":
    main()
