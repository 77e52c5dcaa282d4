"""Speed of the simulator.

    python -m experiments.benchmarks.simulator [--trace conv_poisson_4.5rps_10000.csv]
    python -m experiments.benchmarks.simulator scale [--requests 1000 10000 100000 1000000]
    python -m experiments.benchmarks.simulator fleet [--replicas 64] [--requests 1000000]
    python -m experiments.benchmarks.simulator vidur --vidur FOLDER \\
        --python FOLDER/.venv/bin/python --trace conv_poisson_4.5rps_10000.csv

The first runs the event loop with a record of every step and request; all cases take turns in each
round. Without a trace it draws requests of the same mean lengths and rate. Times are the
processor's.

`scale` runs what a study does with a run: simulate, make tables, summarise and write them, on a
saturated, a busy and a calm server. The cost of a request should not depend on their number, and a
million must fit into 1.5 GB. Each line is from a process of its own; peak MB is its memory.

`fleet` compares a request in a fleet with one on a single replica, which gets as many requests in
all as each replica, at the same rate.

`vidur` runs the trace in Vidur (github.com/microsoft/vidur) and here, in turns. FOLDER is a clone
of Vidur, whose interpreter has what its README asks for. Both simulate Llama-2-7B on one A100 with
7,424 blocks of 16 tokens and at most 128 requests at once, prefill first. Neither writes plots, and
Vidur no metrics. Unknown options go to Vidur. It runs once before the first round, since it trains
its predictor of step times and caches it. Times include those of child processes; *the simulation
alone* is without imports, files and settings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hydra.utils import instantiate
from omegaconf import OmegaConf

import conf
from experiments.benchmarks.harness import (
    ROOT,
    Cost,
    Parser,
    children_cpu_seconds,
    cpu_seconds,
    existing_file,
    in_new_process,
    peak_mb,
    positive_float,
    positive_int,
    row,
    run_command,
    table,
)
from pagedsim.build import make_memory, make_router, make_scheduler
from pagedsim.core import Policy
from pagedsim.fleet.replica import Unit
from pagedsim.fleet.simulate import simulate_fleet
from pagedsim.metrics.files import write_run
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.summary import summarise
from pagedsim.run.compilation import built
from pagedsim.sim.cost import Roofline
from pagedsim.sim.cost.work import total_work
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload, chat_sessions, synthetic, trace
from policies.ordering import FCFS, Priority

# -- the event loop --------------------------------------------------------------------------------

LENGTHS = {
    "shape": "lognormal",
    "prompt_mean": 1000.0,
    "prompt_cv": 0.9,
    "output_mean": 211.0,
    "output_cv": 0.8,
}
COLUMNS = "CSV: arrived_at, num_prefill_tokens, num_decode_tokens"
"""Of a trace, as Vidur names them."""
URGENT = {0.0: 0.2, 1.0: 0.8}
"""The share of requests by priority."""


@dataclass(frozen=True)
class Case:
    """A workload on a server."""

    name: str
    workload: Callable[[], Workload]
    max_seqs: int = 128
    blocks: int = 7424
    batching: str = "prefill_first"
    fast_forward: bool = True
    ahead: bool = False
    """Whether each step is planned while the previous one runs."""
    memory: str = "paged"
    policy: Callable[[], Policy] = FCFS


def loop(words: Sequence[str]) -> None:
    """Print the cost of the event loop for each workload."""
    parser = Parser(__doc__)
    parser.add_argument("--trace", type=existing_file, help=COLUMNS)
    parser.add_argument("--requests", type=positive_int, default=10_000, help="of each workload")
    parser.add_argument("--rounds", type=positive_int, default=5)
    options = parser.parse_args(words)
    served = [(case, case.workload(), Cost()) for case in cases(options.trace, options.requests)]
    found = [serve(case, workload).steps_table().num_rows for case, workload, _ in served]
    for _ in range(options.rounds):
        for case, workload, cost in served:
            cost.add(partial(cpu_seconds, partial(serve, case, workload)))
    print(f"Llama-2-7B, A100-80GB, 7,424 blocks of 16; {built()}; timeouts a request\n")
    head = ["workload", "seconds", "lowest", "timeouts", "lowest", "requests/s", "tokens/s"]
    rows = [loop_row(*one, steps) for one, steps in zip(served, found, strict=True)]
    print(table([*head, "iterations/s"], rows))


@cache
def replica() -> Replica:
    """Llama-2-7B on an A100 with 80 GB, blocks of 16 tokens."""
    folder = Path(conf.__file__).parent
    return Replica(
        model=instantiate(OmegaConf.load(folder / "model" / "llama-2-7b.yaml")),
        hardware=instantiate(OmegaConf.load(folder / "hardware" / "a100-80gb.yaml")),
    )


def serve(case: Case, workload: Workload) -> Recorder:
    """Simulate and record the workload."""
    scheduler = make_scheduler(
        memory=make_memory(case.memory, blocks=case.blocks, block_size=16),
        policy=case.policy(),
        batching=case.batching,
        max_seqs=case.max_seqs,
        max_model_len=4096,
        async_scheduling=case.ahead,
    )
    recorder = Recorder()
    simulate(scheduler, workload, Roofline(replica()), recorder, fast_forward=case.fast_forward)
    return recorder


def conversation(path: str | None, requests: int | None, **labels: Any) -> Case:
    """The conversation trace, or drawn requests like it."""
    if path:
        return Case("conversation trace", lambda: trace(path=path, requests=requests, **labels))
    drawn = partial(synthetic, requests=requests, rate=4.5, lengths=LENGTHS, max_len=4096)
    return Case("conversation, drawn", lambda: drawn(**labels))


def sessions(requests: int) -> Case:
    """Conversations of several turns with prompt contents, for a prefix cache."""
    few = {"shape": "geometric", "mean": 4}
    own = LENGTHS | {"prompt_mean": 250.0}
    talk = partial(chat_sessions, rate=1.1, turns=few, think=15.0, lengths=own, max_len=4096)
    return Case(
        "conversations, prefix cache",
        lambda: talk(sessions=max(1, requests // 4)),
        memory="prefix",
    )


def short(requests: int, prompt: int, output: int, rate: float, **labels: Any) -> Case:
    """Requests of one length with Poisson arrivals."""
    lengths = {"shape": "fixed", "prompt": prompt, "output": output}
    return Case(
        f"{prompt} in, {output} out, {rate:g}/s",
        lambda: synthetic(requests=requests, rate=rate, lengths=lengths, **labels),
        max_seqs=256,
    )


def cases(path: str | None, requests: int) -> list[Case]:
    """The reference case and variants of it."""
    talk = conversation(path, requests)
    urgent = conversation(path, requests, priority=URGENT)
    displacing = partial(Priority, displace=True)
    return [
        talk,
        replace(talk, name=f"{talk.name}, step by step", fast_forward=False),
        replace(talk, name=f"{talk.name}, a step ahead", ahead=True),
        replace(urgent, name=f"{talk.name}, priority displaces", policy=displacing),
        sessions(requests),
        short(requests, 154, 312, rate=1000.0),
    ]


def loop_row(case: Case, workload: Workload, cost: Cost, steps: int) -> list[str]:
    """The cells of one workload."""
    took, requests = median(cost.seconds), len(workload)
    tokens = int(workload.output_len.sum() + workload.prompt_len.sum())
    rates = [f"{requests / took:,.0f}", f"{tokens / took / 1e6:.1f} M", f"{steps / took:,.0f}"]
    return [case.name, *cost.cells(3, requests), *rates]


# -- a whole run, by the number of requests --------------------------------------------------------

LOADS = {
    "saturated": (154, 312, 1000.0),
    "busy": (154, 312, 13.0),
    "calm": (30, 20, 8.0),
}
"""Tokens in and out, and requests a second."""


def scale(words: Sequence[str]) -> None:
    """Print the cost of whole runs of so many requests."""
    parser = Parser(__doc__)
    numbers = [1_000, 10_000, 100_000, 1_000_000]
    parser.add_argument("--requests", type=positive_int, nargs="+", default=numbers)
    parser.add_argument("--load", choices=LOADS, help="only this one")
    options = parser.parse_args(words)
    head = ["load", "requests", "number", "steps", "seconds", "µs/request", "timeouts", "peak MB"]
    print(table(head, []), flush=True)
    for load in [options.load] if options.load else LOADS:
        for requests in options.requests:
            print(row(in_new_process(scale_row, load, requests)), flush=True)


def scale_row(load: str, requests: int) -> list[str]:
    """The cells of one run."""
    case, few = (short(count, *LOADS[load]) for count in (requests, 10))
    whole_run(few, few.workload())  # loads what is imported on first use
    workload, cost, steps = case.workload(), Cost(), list[int]()
    cost.add(partial(cpu_seconds, lambda: steps.append(whole_run(case, workload))))
    each = [f"{cost.seconds[0] / requests * 1e6:.1f}", f"{cost.timeouts[0] / requests:.1f}"]
    counts = [f"{requests:,}", f"{steps[0]:,}", f"{cost.seconds[0]:.2f}"]
    return [load, case.name, *counts, *each, f"{peak_mb():,.0f}"]


def whole_run(case: Case, workload: Workload) -> int:
    """Simulate, summarise and write the tables; returns the number of steps."""
    recorder = serve(case, workload)
    hardware, work = replica().hardware, total_work(replica(), recorder.steps())
    return write_tables(
        recorder,
        total_blocks=case.blocks,
        block_size=16,
        max_seqs=case.max_seqs,
        flops=work.flop,
        bytes=work.bytes,
        peak_flops=hardware.flop_rate,
        peak_bandwidth=hardware.bandwidth,
    )


def write_tables(recorder: Recorder, **settings: Any) -> int:
    """Summarise and write a run; returns the number of steps."""
    requests, steps = recorder.requests_table(), recorder.steps()
    summary = summarise(requests, steps, **settings)
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), requests, steps, summary)
    return steps.num_rows


# -- a fleet ---------------------------------------------------------------------------------------

ROUTERS = ("round_robin", "random", "power_of_two", "least_requests")
BLOCKS, SEQUENCES = 7424, 256


def fleet(words: Sequence[str]) -> None:
    """Print the cost of a request on one replica, then in a fleet by router."""
    parser = Parser(__doc__)
    parser.add_argument("--replicas", type=positive_int, default=64)
    parser.add_argument(
        "--requests", type=positive_int, default=1_000_000, help="of the whole fleet"
    )
    parser.add_argument(
        "--rate", type=positive_float, default=13.0, help="requests/s of each replica"
    )
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=ROUTERS)
    options = parser.parse_args(words)
    head = ["router", "replicas", "requests", "steps", "µs/request", "timeouts", "of one"]
    print(table([*head, "peak MB"], []), flush=True)
    alone = max(options.requests // options.replicas, 1)
    lines: list[tuple[str | None, int, int]] = [(None, 1, alone)]
    lines += [(router, options.replicas, options.requests) for router in options.routers]
    one = 0.0
    for router, replicas, requests in lines:
        found = in_new_process(fleet_line, router, replicas, requests, options.rate)
        if router is None:
            one = found.seconds
        costs = [
            f"{found.seconds * 1e6:.1f}",
            f"{found.timeouts:.1f}",
            f"{found.seconds / one:.2f}",
        ]
        counts = [f"{replicas:,}", f"{requests:,}", f"{found.steps:,}"]
        print(row([router or "one by itself", *counts, *costs, f"{found.peak:,.0f}"]), flush=True)


class FleetLine(NamedTuple):
    """Steps of a run and costs of a request in it."""

    steps: int
    seconds: float
    timeouts: float
    peak: float
    """MB."""


def fleet_line(router: str | None, replicas: int, requests: int, rate: float) -> FleetLine:
    """Simulate a fleet; without a router, one server without one."""
    lengths = {"shape": "fixed", "prompt": 154, "output": 312}
    few = synthetic(requests=10, rate=rate, lengths=lengths)
    serve_fleet(router, replicas, few)  # loads what is imported on first use
    workload = synthetic(requests=requests, rate=rate * replicas, lengths=lengths)
    cost, steps = Cost(), list[int]()
    cost.add(partial(cpu_seconds, lambda: steps.append(serve_fleet(router, replicas, workload))))
    each = cost.seconds[0] / requests, cost.timeouts[0] / requests
    return FleetLine(steps[0], *each, peak_mb())


def serve_fleet(router: str | None, replicas: int, workload: Workload) -> int:
    """A whole run of so many replicas; returns the number of steps."""
    recorder, cost = Recorder(), Roofline(replica())
    units = [_unit(index, cost) for index in range(replicas)]
    if router is None:
        simulate(units[0].scheduler, workload, cost, recorder)
    else:
        recorders = [recorder.add_replica() for _ in units]
        simulate_fleet(units, workload, make_router(router), recorders, recorder)
    return write_tables(
        recorder,
        total_blocks=replicas * BLOCKS,
        block_size=16,
        max_seqs=SEQUENCES,
        replicas=[
            ReplicaFacts(one.name, BLOCKS, 16, SEQUENCES, hardware="a100-80gb") for one in units
        ],
    )


def _unit(index: int, cost: Roofline) -> Unit:
    scheduler = make_scheduler(
        memory=make_memory(blocks=BLOCKS, block_size=16), max_seqs=SEQUENCES, max_model_len=4096
    )
    return Unit(f"replica-{index}", "both", scheduler, cost)


# -- Vidur -----------------------------------------------------------------------------------------

CHILDREN = Path(__file__).with_name("children.py")
VIDUR_OFF = (
    *("write_metrics", "store_plots", "enable_chrome_trace", "store_request_metrics"),
    *("store_batch_metrics", "store_utilization_metrics"),
)
"""Settings of Vidur that are turned off."""


class VidurRun(NamedTuple):
    """What a simulation of Vidur reports."""

    seconds: float
    batches: int
    simulated: float


def vidur(words: Sequence[str]) -> None:
    """Print the costs of both simulators."""
    parser = Parser(__doc__)
    parser.add_argument("--vidur", type=Path, required=True, help="a clone of Vidur")
    parser.add_argument("--python", type=Path, required=True, help="the interpreter that runs it")
    parser.add_argument("--trace", type=existing_file, required=True, help=COLUMNS)
    parser.add_argument("--rounds", type=positive_int, default=3)
    asked, more = parser.parse_known_args(words)
    for name in ("vidur/main.py", "data/profiling"):
        if not (asked.vidur / name).exists():
            parser.error(f"--vidur {asked.vidur}: no checkout of Vidur, it has no {name}")
    if not asked.python.is_file():
        parser.error(f"--python {asked.python}: no such file")
    trace_path, python = Path(asked.trace).resolve(), asked.python.absolute()
    start = partial(run_vidur, asked.vidur.resolve(), python, vidur_words(trace_path, more))
    first, _ = start()
    case = conversation(str(trace_path), None)
    workload = case.workload()
    names = [
        f"{name}, the {part}"
        for part in ("simulation alone", "whole command")
        for name in ("pagedsim", "Vidur")
    ]
    costs, runs = {name: Cost() for name in names}, list[VidurRun]()

    def its_command() -> float:
        seconds, run = start()
        runs.append(run)
        return seconds

    for _ in range(asked.rounds):
        costs[names[0]].add(partial(cpu_seconds, partial(serve, case, workload)))
        costs[names[2]].add(partial(run_pagedsim, trace_path))
        costs[names[3]].add(its_command)
        run, whole = runs[-1], costs[names[3]]
        costs[names[1]].seconds.append(run.seconds)
        costs[names[1]].timeouts.append(run.seconds * whole.timeouts[-1] / whole.seconds[-1])
    steps, requests = serve(case, workload).steps_table().num_rows, len(workload)
    print(f"{requests:,} requests; pagedsim is {built()}: {steps:,} steps")
    print(f"Vidur: {run.batches:,} batches, {run.simulated:,.0f} s simulated; ", end="")
    print(f"the first run, with the training of its predictor, took {first:.0f} s\n")
    rows = []
    for name, cost in costs.items():
        base = costs[name.replace("Vidur", "pagedsim")]
        times = f"{min(cost.timeouts) / min(base.timeouts):.1f}"
        rows.append([name, *cost.cells(2, requests), times])
    print(table(["", "seconds", "lowest", "timeouts a request", "lowest", "×"], rows))


def vidur_words(trace_path: Path, more: Sequence[str]) -> list[str]:
    """The words of Vidur's command line."""
    return [
        *("--request_generator_config_type", "trace_replay"),
        *("--trace_request_generator_config_trace_file", str(trace_path)),
        *("--replica_config_model_name", "meta-llama/Llama-2-7b-hf"),
        *("--replica_config_device", "a100"),
        *("--replica_scheduler_config_type", "vllm", "--vllm_scheduler_config_block_size", "16"),
        *("--vllm_scheduler_config_batch_size_cap", "128"),
        *("--vllm_scheduler_config_num_blocks", "7424"),
        *(f"--no-metrics_config_{name}" for name in VIDUR_OFF),
        *more,
    ]


def run_vidur(folder: Path, python: Path, words: Sequence[str]) -> tuple[float, VidurRun]:
    """Processor seconds of its whole command, and its simulation."""
    alone = {"WANDB_MODE": "disabled", "PYTHONPATH": ""}
    took, output = _run_command([str(python), str(CHILDREN), "vidur", *words], folder, alone)
    (line,) = (one for one in output.splitlines() if one.startswith("loop "))
    values = line.split()[1::2]
    return took, VidurRun(float(values[0]), int(values[1]), float(values[2]))


def run_pagedsim(trace_path: Path) -> float:
    """Processor seconds of our whole command."""
    with tempfile.TemporaryDirectory() as folder:
        words = (
            *(sys.executable, "-m", "pagedsim", "experiment=single", "model=llama-2-7b"),
            *("hardware=a100-80gb", "memory.blocks=7424", "server.max_seqs=128", "report=false"),
            *("tracking=none", "workload=trace", f"workload.path={trace_path}", "seeds=1"),
            f"hydra.run.dir={folder}",
        )
        return _run_command(words, ROOT, {})[0]


def _run_command(words: Sequence[str], folder: Path, more: Mapping[str, str]) -> tuple[float, str]:
    """Processor seconds of a command with all its processes, and its output."""
    before = children_cpu_seconds()
    done = subprocess.run(
        words, cwd=folder, env=os.environ | dict(more), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr[-2000:]}\n{words[0]} failed")
    return children_cpu_seconds() - before, done.stdout


COMMANDS = {"loop": loop, "scale": scale, "fleet": fleet, "vidur": vidur}


def main(words: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    run_command(COMMANDS, words)


if __name__ == "__main__":
    main()
