"""Speed of the simulator.

    python -m pagedsim.experiments.benchmarks.simulator [--trace conv_poisson_4.5rps_10000.csv]
    python -m pagedsim.experiments.benchmarks.simulator offloading [--requests 4000]
    python -m pagedsim.experiments.benchmarks.simulator scale [--requests 1000 10000 100000 1000000]

The first runs the event loop with a record of every step and request; without a trace it draws
requests of the same mean lengths and rate. Times are the processor's.

`offloading` compares a step with `offload=vllm` to one without, in conversations of which the GPU
cannot keep all: requests take other steps then, so the ratio is of seconds a step.

`scale` runs what a study does with a run: simulate, make tables, summarise and write them, on a
saturated, a busy and a calm server. Each line is from a process of its own; peak MB is its memory.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from pagedsim.backends.base import BackendRun, StoppableRecorder
from pagedsim.experiments.benchmarks.harness import (
    Cost,
    cost_cells,
    cost_of,
    cpu_seconds,
    in_turns,
    main_of,
    parse,
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


def lengths(prompt: int) -> Words:
    """Lengths as of the trace, with prompts of this mean."""
    means = f"prompt_mean={prompt}", "prompt_cv=0.9", "output_mean=211", "output_cv=0.8"
    return ("workload.lengths.shape=lognormal", *(f"++workload.lengths.{mean}" for mean in means))


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
    trace = {"help": "a CSV: arrived_at, num_prefill_tokens, num_decode_tokens"}
    asked = parse(__doc__, words, {"--trace": trace, "--requests": 10_000, "--rounds": 5})
    every = cases(asked.trace, asked.requests)
    workloads = {name: run_of(words).workload() for name, words in every.items()}

    def cost(name: str) -> Cost:
        run = run_of(every[name]).prepare()
        return cost_of(lambda: serve(run, workloads[name]))

    costs = in_turns({name: partial(cost, name) for name in every}, asked.rounds)
    rows = []
    for name, workload in workloads.items():
        tokens = int(workload.output_len.sum() + workload.prompt_len.sum())
        rate = tokens / median(cost.seconds for cost in costs[name])
        rows.append([name, *cost_cells(costs[name], 3, len(workload)), f"{rate / 1e6:.1f} M"])
    print(f"Llama-2-7B, A100-80GB, 7,424 blocks of 16; {built()}; timeouts a request\n")
    head = ["workload", "seconds", "lowest", "timeouts", "lowest", "tokens/s"]
    print(table(head, rows))


def cases(path: str | None, requests: int) -> dict[str, Words]:
    """The trace, or drawn requests like it, and variants."""
    drawn = ("workload=sharegpt", "workload.rate=4.5", *lengths(1000))
    source = ("workload=trace", f"workload.path={path}") if path else drawn
    talk = (*source, f"workload.requests={requests}", "workload.max_len=4096")
    name = "conversation trace" if path else "conversation, drawn"
    displacing = ("policy=priority", "policy.displace=true", "workload.priority={0:0.2,1:0.8}")
    return {
        name: talk,
        f"{name}, step by step": (*talk, "backend.fast_forward=false"),
        f"{name}, a step ahead": (*talk, "server.async_scheduling=true"),
        f"{name}, priority displaces": (*talk, *displacing),
        "conversations, prefix cache": conversations(requests),
        "154 in, 312 out, 1000/s": short(requests, 154, 312, 1000),
    }


def conversations(requests: int) -> Words:
    """Sessions of about four turns, with a prefix cache."""
    turns = ("workload=chat_sessions", "workload.rate=1.1", "memory=prefix", *lengths(250))
    sessions = (f"workload.sessions={max(1, requests // 4)}", "workload.think=15")
    return (*turns, *sessions, "workload.prefixes=null")


# -- offloading ------------------------------------------------------------------------------------


def offloading(words: Sequence[str]) -> None:
    """Print the cost of a step with offloading and without."""
    asked = parse(__doc__, words, {"--requests": 4_000, "--rounds": 5})
    load = (*conversations(asked.requests), "batching=unified")
    kinds = {"fast-forwarded": (), "step by step": ("backend.fast_forward=false",)}
    arms = {
        (kind, offload): (*load, *more, f"offload={offload}")
        for kind, more in kinds.items()
        for offload in ("none", "vllm")
    }
    workload, steps = run_of(load).workload(), dict[tuple[str, str], int]()

    def seconds(arm: tuple[str, str]) -> float:
        run, recorders = run_of(arms[arm]).prepare(), list[Recorder]()
        took = cpu_seconds(lambda: recorders.append(serve(run, workload)))
        steps[arm] = recorders[0].steps().num_rows
        return took / steps[arm]

    costs, rows = in_turns({arm: partial(seconds, arm) for arm in arms}, asked.rounds), []
    for kind in kinds:
        without, with_tier = (costs[kind, offload] for offload in ("none", "vllm"))
        ratio = median(b / a for a, b in zip(without, with_tier, strict=True))
        each = [f"{median(some) * 1e6:.1f}" for some in (without, with_tier)]
        counts = [f"{steps[kind, offload]:,}" for offload in ("none", "vllm")]
        rows.append([kind, *counts, *each, f"{ratio:.2f}"])
    print(f"{asked.requests:,} requests in conversations; {built()}\n")
    print(table(["", "steps", "with offloading", "µs a step", "with offloading", "×"], rows))


# -- a whole run, by the number of requests --------------------------------------------------------

LOADS = {"saturated": (154, 312, 1000.0), "busy": (154, 312, 13.0), "calm": (30, 20, 8.0)}
"""Tokens in and out, and requests a second."""


def scale(words: Sequence[str]) -> None:
    """Print the cost of whole runs of so many requests."""
    options = {"--requests": [1_000, 10_000, 100_000, 1_000_000]}
    loads = {"nargs": "+", "choices": LOADS, "default": LOADS}
    asked = parse(__doc__, words, {**options, "--loads": loads})
    head = ["load", "requests", "number", "steps", "seconds", "µs/request", "timeouts", "peak MB"]
    rows = []
    for load, requests in product(asked.loads, asked.requests):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            rows.append(process.submit(scale_row, load, requests).result())
    print(table(head, rows))


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


main = main_of(__name__, loop, offloading, scale)
