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

import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, cast

from omegaconf import OmegaConf

from pagedsim.experiments.benchmarks.harness import (
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
from pagedsim.metrics.files import write_run
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.summary import summarise
from pagedsim.options import Options
from pagedsim.run.backend import BackendRun, RunConfig, StoppableRecorder
from pagedsim.run.provenance import built
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
URGENT = "workload.priority={0:0.2,1:0.8}"
"""The share of requests by priority."""
AHEAD = "server.async_scheduling=true"
DISPLACING = ("policy=priority", "policy.displace=true", URGENT)
TURNS = ("workload=chat_sessions", "workload.rate=1.1", "memory=prefix")


def lengths(prompt: int) -> Words:
    """Lengths as of the trace, with prompts of this mean."""
    means = f"prompt_mean={prompt}", "prompt_cv=0.9", "output_mean=211", "output_cv=0.8"
    return ("workload.lengths.shape=lognormal", *(f"++workload.lengths.{one}" for one in means))


def conversation(path: str | None, requests: int) -> Words:
    """The conversation trace, or drawn requests like it."""
    drawn = ("workload=sharegpt", "workload.rate=4.5", *lengths(1000))
    source = ("workload=trace", f"workload.path={path}") if path else drawn
    return (*source, f"workload.requests={requests}", "workload.max_len=4096")


def sessions(requests: int) -> Words:
    """Conversations of several turns with prompt contents, for a prefix cache."""
    return (*TURNS, f"workload.sessions={max(1, requests // 4)}")


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
    made = Options().compose("config", [*SERVER, *words]).config
    return cast(dict[str, Any], OmegaConf.to_container(made, resolve=True))


def prepared(words: Words) -> BackendRun:
    """A run of these words, which serves one workload."""
    return RunConfig(composed(words)).prepare()


def workload_of(words: Words) -> Workload:
    """The requests of these words."""
    return RunConfig(composed(words)).workload()


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
    workloads = {name: workload_of(settings) for name, settings in every.items()}
    costs = {name: Cost() for name in every}
    steps = {
        name: serve(prepared(settings), workloads[name]).steps_table().num_rows
        for name, settings in every.items()
    }
    for _ in range(asked.rounds):
        for name, settings in every.items():
            run = prepared(settings)
            costs[name].add(partial(cpu_seconds, partial(serve, run, workloads[name])))
    rows = []
    for name, cost in costs.items():
        took, requests = median(cost.seconds), len(workloads[name])
        tokens = int(workloads[name].output_len.sum() + workloads[name].prompt_len.sum())
        rates = [f"{requests / took:,.0f}", f"{tokens / took / 1e6:.1f} M"]
        rows.append([name, *cost.cells(3, requests), *rates, f"{steps[name] / took:,.0f}"])
    print(f"Llama-2-7B, A100-80GB, 7,424 blocks of 16; {built()}; timeouts a request\n")
    head = ["workload", "seconds", "lowest", "timeouts", "lowest", "requests/s", "tokens/s"]
    print(table([*head, "iterations/s"], rows))


def cases(path: str | None, requests: int) -> dict[str, Words]:
    """The reference case and variants of it."""
    talk = conversation(path, requests)
    name = "conversation trace" if path else "conversation, drawn"
    own = (*lengths(250), "workload.think=15", "workload.prefixes=null")
    return {
        name: talk,
        f"{name}, step by step": (*talk, "backend.fast_forward=false"),
        f"{name}, a step ahead": (*talk, AHEAD),
        f"{name}, priority displaces": (*talk, *DISPLACING),
        "conversations, prefix cache": (*sessions(requests), *own),
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
            print(row(in_new_process(scale_row, load, requests)), flush=True)


def scale_row(load: str, requests: int) -> list[str]:
    """The cells of one run."""
    prompt, output, rate = LOADS[load]
    words, few = (short(count, prompt, output, rate) for count in (requests, 10))
    whole_run(prepared(few), workload_of(few))  # loads what is imported on first use
    run, workload, cost, steps = prepared(words), workload_of(words), Cost(), list[int]()
    cost.add(partial(cpu_seconds, lambda: steps.append(whole_run(run, workload))))
    each = [f"{cost.seconds[0] / requests * 1e6:.1f}", f"{cost.timeouts[0] / requests:.1f}"]
    counts = [f"{requests:,}", f"{steps[0]:,}", f"{cost.seconds[0]:.2f}"]
    name = f"{prompt} in, {output} out, {rate:g}/s"
    return [load, name, *counts, *each, f"{peak_mb():,.0f}"]


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
