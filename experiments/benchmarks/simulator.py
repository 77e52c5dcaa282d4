"""Speed of the simulator.

    python -m pagedsim.experiments.benchmarks.simulator [--trace conv_poisson_4.5rps_10000.csv]
    python -m pagedsim.experiments.benchmarks.simulator scale [--requests 1000 10000 100000 1000000]

The first runs the event loop with a record of every step and request; all cases take turns in each
round. Without a trace it draws requests of the same mean lengths and rate. Times are the
processor's.

`scale` runs what a study does with a run: simulate, make tables, summarise and write them, on a
saturated, a busy and a calm server. The cost of a request should not depend on their number, and a
million must fit into 1.5 GB. Each line is from a process of its own; peak MB is its memory.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from pagedsim.backends.base import BackendRun, StoppableRecorder
from pagedsim.experiments.benchmarks.harness import (
    Cost,
    cost_cells,
    cost_of,
    existing_file,
    in_turns,
    main_of,
    parse,
    row,
    table,
)
from pagedsim.metrics.files import write_run
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.summary import summarise
from pagedsim.run.provenance import built
from pagedsim.spec.composed import Composed
from pagedsim.spec.run import RunSpec
from pagedsim.workload import Workload

# -- workloads, as words of a command line ---------------------------------------------------------

Words = tuple[str, ...]
"""Settings of `python -m pagedsim experiment=single`."""

SERVER = (
    *("experiment=single", "model=llama-2-7b", "tracking=none", "seeds=1", "jobs=1"),
    *("server.max_model_len=4096", "memory.blocks=7424", "server.max_seqs=128"),
)
"""Llama-2-7B on an A100 with 80 GB, blocks of 16 tokens."""
TRACE = {"type": existing_file, "help": "CSV: arrived_at, num_prefill_tokens, num_decode_tokens"}
"""The option of a trace, with columns as Vidur names them."""
DISPLACING = ("policy=priority", "policy.displace=true", "workload.priority={0:0.2,1:0.8}")


def lengths(prompt: int) -> Words:
    """Lengths as of the trace, with prompts of this mean."""
    means = f"prompt_mean={prompt}", "prompt_cv=0.9", "output_mean=211", "output_cv=0.8"
    return ("workload.lengths.shape=lognormal", *(f"++workload.lengths.{one}" for one in means))


def short(requests: int, prompt: int, output: int, rate: float) -> Words:
    """Requests of one length with Poisson arrivals."""
    return (
        *("workload=fixed", "workload.arrivals=poisson", f"workload.rate={rate:g}"),
        f"workload.lengths={{shape:fixed,prompt:{prompt},output:{output}}}",
        *(f"workload.requests={requests}", "server.max_seqs=256"),
    )


@cache
def composed(words: Words) -> dict[str, Any]:
    """The configuration of these words."""
    return Composed.of([*SERVER, *words]).resolved()


def run_of(words: Words) -> RunSpec:
    """The configuration of one run."""
    return RunSpec(composed(words))


def serve(run: BackendRun, workload: Workload) -> Recorder:
    """Simulate and record the workload."""
    recorder = StoppableRecorder()
    run.run(workload, recorder)
    return recorder


# -- the event loop --------------------------------------------------------------------------------


def loop(words: Sequence[str]) -> None:
    """Print the cost of the event loop for each workload."""
    asked = parse(__doc__, words, {"--trace": TRACE, "--requests": 10_000, "--rounds": 5})
    every = cases(asked.trace, asked.requests)
    workloads = {name: run_of(words).workload() for name, words in every.items()}
    steps = {
        name: serve(run_of(words).prepare(), workloads[name]).steps_table().num_rows
        for name, words in every.items()
    }

    def cost(name: str) -> Cost:
        run = run_of(every[name]).prepare()
        return cost_of(lambda: serve(run, workloads[name]))

    rows = []
    for name, costs in in_turns(
        {name: partial(cost, name) for name in every}, asked.rounds
    ).items():
        workload, took = workloads[name], median(one.seconds for one in costs)
        tokens = int(workload.output_len.sum() + workload.prompt_len.sum())
        rates = [f"{len(workload) / took:,.0f}", f"{tokens / took / 1e6:.1f} M"]
        cells = cost_cells(costs, 3, len(workload))
        rows.append([name, *cells, *rates, f"{steps[name] / took:,.0f}"])
    print(f"Llama-2-7B, A100-80GB, 7,424 blocks of 16; {built()}; timeouts a request\n")
    head = ["workload", "seconds", "lowest", "timeouts", "lowest", "requests/s", "tokens/s"]
    print(table([*head, "iterations/s"], rows))


def cases(path: str | None, requests: int) -> dict[str, Words]:
    """The trace, or drawn requests like it, and variants."""
    drawn = ("workload=sharegpt", "workload.rate=4.5", *lengths(1000))
    source = ("workload=trace", f"workload.path={path}") if path else drawn
    talk = (*source, f"workload.requests={requests}", "workload.max_len=4096")
    name = "conversation trace" if path else "conversation, drawn"
    turns = ("workload=chat_sessions", "workload.rate=1.1", "memory=prefix", *lengths(250))
    sessions = (f"workload.sessions={max(1, requests // 4)}", "workload.think=15")
    return {
        name: talk,
        f"{name}, step by step": (*talk, "backend.fast_forward=false"),
        f"{name}, a step ahead": (*talk, "server.async_scheduling=true"),
        f"{name}, priority displaces": (*talk, *DISPLACING),
        "conversations, prefix cache": (*turns, *sessions, "workload.prefixes=null"),
        "154 in, 312 out, 1000/s": short(requests, 154, 312, 1000),
    }


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
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                print(row(process.submit(scale_row, load, requests).result()), flush=True)


def scale_row(load: str, requests: int) -> list[str]:
    """The cells of one run."""
    prompt, output, rate = LOADS[load]
    words, few = (short(count, prompt, output, rate) for count in (requests, 10))
    whole_run(run_of(few).prepare(), run_of(few).workload())  # loads what is imported on first use
    run, workload, steps = run_of(words).prepare(), run_of(words).workload(), list[int]()
    seconds, timeouts = cost_of(lambda: steps.append(whole_run(run, workload)))
    each = [f"{seconds / requests * 1e6:.1f}", f"{timeouts / requests:.1f}"]
    counts = [f"{requests:,}", f"{steps[0]:,}", f"{seconds:.2f}"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [load, f"{prompt} in, {output} out, {rate:g}/s", *counts, *each, f"{peak:,.0f}"]


def whole_run(run: BackendRun, workload: Workload) -> int:
    """Simulate, summarise and write the tables; returns the number of steps."""
    recorder = serve(run, workload)
    requests, steps = recorder.requests_table(), recorder.steps()
    known: dict[str, Any] = {**run.sizes(), **run.work(steps)}
    summary = summarise(requests, steps, **known)
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), requests, steps, summary)
    return steps.num_rows


main = main_of(__name__, loop, scale)
