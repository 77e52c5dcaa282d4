"""Speed of the simulator.

    python -m experiments.benchmarks.simulator [--trace conv_poisson_4.5rps_10000.csv]
    python -m experiments.benchmarks.simulator scale [--requests 1000 10000 100000 1000000]

The first runs the event loop with a record of every step and request; all cases take turns in each
round. Without a trace it draws requests of the same mean lengths and rate. Times are the
processor's.

`scale` runs what a study does with a run: simulate, make tables, summarise and write them, on a
saturated, a busy and a calm server. The cost of a request should not depend on their number, and a
million must fit into 1.5 GB. Each line is from a process of its own; peak MB is its memory.

"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

import conf
from experiments.benchmarks.harness import (
    Cost,
    cpu_seconds,
    existing_file,
    in_new_process,
    main_of,
    parse,
    peak_mb,
    row,
    table,
)
from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy
from pagedsim.metrics.files import write_run
from pagedsim.metrics.recorder import Recorder
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
TRACE = {"type": existing_file, "help": "CSV: arrived_at, num_prefill_tokens, num_decode_tokens"}
"""The option of a trace, with columns as Vidur names them."""
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
    asked = parse(__doc__, words, {"--trace": TRACE, "--requests": 10_000, "--rounds": 5})
    served = [(case, case.workload(), Cost()) for case in cases(asked.trace, asked.requests)]
    found = [serve(case, workload).steps_table().num_rows for case, workload, _ in served]
    for _ in range(asked.rounds):
        for case, workload, cost in served:
            cost.add(partial(cpu_seconds, partial(serve, case, workload)))
    rows = []
    for (case, workload, cost), steps in zip(served, found, strict=True):
        took, requests = median(cost.seconds), len(workload)
        tokens = int(workload.output_len.sum() + workload.prompt_len.sum())
        rates = [f"{requests / took:,.0f}", f"{tokens / took / 1e6:.1f} M", f"{steps / took:,.0f}"]
        rows.append([case.name, *cost.cells(3, requests), *rates])
    print(f"Llama-2-7B, A100-80GB, 7,424 blocks of 16; {built()}; timeouts a request\n")
    head = ["workload", "seconds", "lowest", "timeouts", "lowest", "requests/s", "tokens/s"]
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


# -- a whole run, by the number of requests --------------------------------------------------------

LOADS = {
    "saturated": (154, 312, 1000.0),
    "busy": (154, 312, 13.0),
    "calm": (30, 20, 8.0),
}
"""Tokens in and out, and requests a second."""


def scale(words: Sequence[str]) -> None:
    """Print the cost of whole runs of so many requests."""
    options = {"--requests": [1_000, 10_000, 100_000, 1_000_000]}
    loads = {"nargs": "+", "choices": LOADS, "default": LOADS}
    asked = parse(__doc__, words, {**options, "--loads": loads})
    head = ["load", "requests", "number", "steps", "seconds", "µs/request", "timeouts", "peak MB"]
    print(table(head, []), flush=True)
    for load in asked.loads:
        for requests in asked.requests:
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
    requests, steps = recorder.requests_table(), recorder.steps()
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


main = main_of(loop, scale)

if __name__ == "__main__":
    main()
