"""The time of a decode step by kernel, and launches a layer.

    python -m experiments.benchmarks.profile
    python -m experiments.benchmarks.profile --device cpu --quick    (torch's operations, there)

The greedy step of step.py with the native forward pass, captured once: its graph is replayed under
torch's profiler. Wrong logits are not profiled. A kernel belongs to a layer as often as each layer
launches it. The time of a step is measured without the profiler, over many in a row; *busy* is the
share of it in which kernels run. Results go to experiments/results/<GPU>/profile.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from experiments.benchmarks.device import Results, parse_device
from experiments.benchmarks.harness import columns, main_of
from experiments.benchmarks.step import DTYPE, Arm, Bench, has_graphs, size_of
from experiments.benchmarks.timing import TIMED, Line, medians, wait
from pagedsim.engine.engine import LLMEngine
from pagedsim.kernels.float8 import AUTO

REPLAYS = 10
"""Profiled steps, timed as one."""
SHOWN, WIDTH = 30, 90
"""Kernels in the table, and characters of their names."""


def profile(words: Sequence[str]) -> None:
    """Profile one step; print a table, and keep the results."""
    asked = parse_device(__doc__, words)
    torch.set_num_threads(1)
    size = size_of(asked.quick)
    bench = Bench(size, asked.device, asked.rounds, asked.quick)
    arm = Arm(AUTO, "native", has_graphs(asked.device))
    about = {"model": size.shape.name, "batch": size.batch, "layers": size.shape.layers}
    results = Results("profile", "profile", words, asked, DTYPE, arm=str(arm), **about)
    found = profiled(bench, bench.engine(arm), arm)
    results.content |= found
    if "failed" in found:
        results.keep()
        sys.exit(f"{arm}: {found['failed']}, not profiled")
    cells: dict[str, Callable[[Line], str]] = {
        "kernel": lambda one: f"`{one['name'][:WIDTH]}`",
        "ms a step": lambda one: f"{one[TIMED] * 1e3:.3f}",
        "": lambda one: f"{one[TIMED] / found['busy_seconds']:.1%}",
        "launches": lambda one: f"{one['launches']:g}",
        "a layer": lambda one: str(one["a_layer"] or ""),
    }
    title = results.heading(size.shape.name, DTYPE, f"{size.batch} requests", str(arm))
    results.close(
        f"{title}: a step takes {found[TIMED] * 1e3:.3f} ms, kernels run for {found['busy']:.0%} "
        f"of it, {found['launches_a_layer']} launches a layer, {found['launches']:g} in all\n\n"
        f"{columns(found['kernels'][:SHOWN], cells)}"
    )


def profiled(bench: Bench, engine: LLMEngine, arm: Arm) -> Line:
    """The time of a step by kernel, if its logits are right."""
    runner, device, layers = engine.runner, bench.device, bench.size.shape.layers
    if arm.graphs and runner.graphs is None:
        return {"failed": "no graph was captured"}
    plan = engine.scheduler.plan(engine.now)
    inputs = runner.inputs_of(plan)
    verdict = bench.verdict(plan, arm, runner.carry_out(inputs).clone())
    if not verdict.right:
        return {"failed": f"off by {verdict.error:.2g} of the norm"}

    def steps() -> None:
        for _ in range(REPLAYS):
            runner.carry_out(inputs)

    seconds = medians({"steps": steps}, device, bench.rounds, wall=True)["steps"] / REPLAYS
    by_name(steps, device)  # warms up the profiler
    kernels: list[Line] = [
        {
            "name": name,
            "launches": launches / REPLAYS,
            "a_layer": launches // (REPLAYS * layers),
            "seconds": total / REPLAYS,
        }
        for name, (launches, total) in by_name(steps, device).items()
    ]
    if not any(one["a_layer"] for one in kernels):  # its driver may not see into graphs
        return {"failed": "the profiler has seen no kernel of a layer"}
    kernels.sort(key=lambda one: one["seconds"], reverse=True)
    busy = sum(one["seconds"] for one in kernels)
    return {
        "seconds": seconds,
        "busy_seconds": busy,
        "busy": busy / seconds,
        "launches": sum(one["launches"] for one in kernels),
        "launches_a_layer": sum(one["a_layer"] for one in kernels),
        "kernels": kernels,
    }


def by_name(call: Callable[[], object], device: torch.device) -> dict[str, tuple[int, float]]:
    """Launches and total seconds of each kernel; on a CPU, of each of torch's operations without
    those that it calls."""
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profiler(activities=[activity]) as found:
        call()
        wait(device)
    sums: dict[str, tuple[int, float]] = {}
    for event in found.events():
        if cuda and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            continue
        took = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        launches, seconds = sums.get(event.name, (0, 0.0))
        sums[event.name] = launches + 1, seconds + took / 1e6
    return sums


main = main_of(profile)

if __name__ == "__main__":
    main()
