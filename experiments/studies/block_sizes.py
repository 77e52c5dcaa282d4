"""Effect of the block size on memory, batch, latency, throughput and kernel time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedsim.backends.engine import the_machine, threads
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole
from pagedsim.experiments.benchmarks.harness import in_turns
from pagedsim.experiments.papers.panels import Panel, draw_panels
from pagedsim.experiments.papers.reproduction import Reproduction
from pagedsim.experiments.studies.compare import check_metrics
from pagedsim.fidelity.engine_model import replica_of
from pagedsim.metrics.arms import Run
from pagedsim.metrics.catalogue import Scale, keys_of, label_of, metric_of, scale_of
from pagedsim.metrics.compare import Column, Estimate, column_of_runs, estimate
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.style import MUTED
from pagedsim.report.table import kinds_of_means
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pagedsim.sim.model import ModelShape


E2E = "e2e_mean"


@dataclass(frozen=True, kw_only=True)
class BlockSizes(Reproduction):
    """The same requests under every block size; on the engine, the kernel is also timed."""

    backends = ("sim", "engine")

    sizes: Sequence[int]
    metrics: Sequence[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes("sizes", self.sizes, least=2)
        check_metrics("metrics", self.metrics)

    def arms(self) -> Mapping[str, Sequence[str]]:
        return {_arm(size): [f"memory.block_size={size}"] for size in self.sizes}

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Analysis:
        of = {size: runs[_arm(size)] for size in self.sizes}
        keys = list(dict.fromkeys([*keys_of(self.metrics), E2E]))
        arms = {_arm(size): runs[_arm(size)] for size in self.sizes}
        columns = {key: column_of_runs(arms, key) for key in keys}
        metrics = {key: list(map(column.estimate, arms)) for key, column in columns.items()}
        unused = [
            estimate([unused_slots(run, size) for run in of[size]]).mean for size in self.sizes
        ]
        kernel = self._kernel(of[self.sizes[0]][0])
        seconds = kernel["seconds"].values() if kernel else []
        data: dict[str, Any] = {
            "sizes": list(self.sizes),
            "metrics": {key: [list(value) for value in values] for key, values in metrics.items()},
            "unused_slots_a_sequence": unused,
            **({"kernel": kernel} if kernel else {}),
        }
        scales = {key: scale_of(key, [e.mean for e in values]) for key, values in metrics.items()}
        titles = {key: _title(key, scales[key]) for key in metrics}
        panels = {
            titles[key]: [Estimate(*(scales[key].factor * x for x in value)) for value in values]
            for key, values in metrics.items()
        }
        if kernel:
            microseconds = [Estimate(1e6 * value, math.nan, math.nan) for value in seconds]
            panels["Attention of one layer (µs)"] = microseconds
        table = [
            [titles[key], *(scales[key].number(value.mean) for value in values)]
            for key, values in metrics.items()
        ]
        note = kinds_of_means(
            len(of[self.sizes[0]]), [(key, column.geometric) for key, column in columns.items()]
        )
        if kernel:
            table.append(["attention of a layer (µs)", *(f"{1e6 * s:,.0f}" for s in seconds)])
        caption = "Each against the block size, under one seed."
        if len(of[self.sizes[0]]) > 1:
            caption = (
                "Each against the block size; bars are 95 % confidence intervals over seeds. All "
                "sizes saw the same requests, so differences are surer than bars suggest."
            )
        return Analysis(
            finding=self._finding(metrics, self._alike(columns[E2E]), unused, kernel),
            rows=[
                Row(f"unused slots a sequence, blocks of {size}", value, (size - 1) / 2)
                for size, value in zip(self.sizes, unused, strict=True)
            ],
            listings=[
                Listing("By block size", ["block size", *map(str, self.sizes)], table, f"{note}.")
            ],
            notes=[
                "unused slots are published as a rule: (B - 1) / 2 with blocks of B, for sequences "
                "that are long beside a block; ours are of the time in which all who hold memory "
                "decode"
            ],
            data=data,
            drawings={
                "sizes": FigureSpec(
                    "Along the block size", caption, partial(draw_sizes, self.sizes, panels)
                )
            },
        )

    def _kernel(self, run: Run) -> dict[str, Any] | None:
        """Attention times on the engine's device for a full batch of decodes."""
        machine = run.summary.get("machine")
        if machine is None:
            return None
        sequences = machine["max_seqs"]
        slots = machine["blocks"] * machine["block_size"]
        decodes = Decodes(
            replica_of(run.config, machine).model,
            sequences,
            max(1, min(slots // sequences, machine["max_model_len"])),
            machine["dtype"],
            "cpu" if machine["cuda"] is None else "cuda",
            machine.get("kv_cache_dtype", "auto"),
        )
        on_cpu = run.config["backend"].get("clock") == "cpu"
        with the_machine(lambda: False), threads(machine["threads"]):
            seconds = attention_seconds(
                decodes, self.sizes, time.process_time if on_cpu else time.perf_counter
            )
        return {
            "seconds": {str(size): value for size, value in seconds.items()},
            "sequences": decodes.sequences,
            "context": decodes.context,
            "device": machine["device"],
        }

    def _alike(self, times: Column) -> list[int]:
        """Sizes not significantly slower than the best, paired by seed; none for one seed."""
        best = min(times.arms, key=times.mean)
        slower = {size: times.compare(_arm(size), best) for size in self.sizes}
        surely = [
            size
            for size, more in slower.items()
            if more and (more.ratio.low if more.ratio.known else more.ratio.mean) > 1
        ]
        return [s for s in self.sizes if s not in surely] if len(times.of(best)) > 1 else []

    def _finding(
        self,
        estimates: Mapping[str, Sequence[Estimate]],
        alike: Sequence[int],
        unused: Sequence[float],
        kernel: Mapping[str, Any] | None,
    ) -> list[str]:
        small, large = self.sizes[0], self.sizes[-1]
        means = [value.mean for value in estimates[E2E]]
        at = means.index(min(means))
        scale = scale_of(E2E, [means[at]])
        others = [str(size) for size in alike if size != self.sizes[at]]
        ends = [place for place in (0, len(means) - 1) if place != at]
        times = [
            f"{means[end] / means[at]:.2f} times as long with {self.sizes[end]}" for end in ends
        ]
        beside = f"it takes {' and '.join(times)}" if times else "no other size was tried"
        sure = f" (not surely slower: {', '.join(others)})" if others else ""
        sentences = [
            f"Requests are answered soonest with blocks of {self.sizes[at]}{sure}, after "
            f"{scale.text(means[at])} on average; {beside}.",
            f"A sequence leaves {unused[0]:.3g} slots unused with blocks of {small} and "
            f"{unused[-1]:.3g} with {large}.",
        ]
        if kernel:
            took = {int(size): value for size, value in kernel["seconds"].items()}
            fast = min(took, key=lambda size: took[size])
            sentences.append(
                f"Attention of one layer over {kernel['sequences']} sequences of "
                f"{kernel['context']} tokens takes {1e6 * took[fast]:,.0f} µs with blocks of "
                f"{fast}, {took[small] / took[fast]:.2f} times that with {small} and "
                f"{took[large] / took[fast]:.2f} times with {large}."
            )
        return sentences


def _arm(size: int) -> str:
    return f"blocks of {size}"


def _title(key: str, scale: Scale) -> str:
    suffix = "per second" if metric_of(key).unit == "1/s" else scale.suffix
    return label_of(key) + (f" ({suffix})" if suffix else "")


def require_sizes(key: str, sizes: Sequence[int], least: int = 1) -> None:
    """Raise ConfigError unless these are at least `least` distinct positive integers."""
    if not isinstance(sizes, (list, tuple)):
        raise ConfigError(f"{key}={sizes}: must be a list such as [8, 16]")
    for size in sizes:
        require_whole(key, size, 1)
    if len(sizes) < least or len(set(sizes)) < len(sizes):
        raise ConfigError(f"{key}={list(sizes)}: must be {least} or more that differ")


def unused_slots(run: Run, block_size: int) -> float:
    """Unused slots per sequence, over the time in which all requests in memory decode; NaN if none.

    Only then the number of tokens in memory is recorded. For sequences much longer than a block,
    (block_size - 1) / 2 is expected.
    """
    table = run.steps("start", "end", "used_blocks", "decode_seqs", "decode_context", "running")
    start, end, used, decodes, context, running = (
        np.asarray(column.to_numpy(), dtype=np.float64) for column in table.columns
    )
    plain = (decodes > 0) & (decodes == running)
    if not plain.any():
        return math.nan
    unused = (used[plain] * block_size - context[plain]) / decodes[plain]
    return float(np.average(unused, weights=(end - start)[plain]))


ROUNDS = 5
"""Rounds, of which the minimum is taken."""
CALLS = 10


@dataclass(frozen=True)
class Decodes:
    """One layer's attention in a decode step."""

    shape: ModelShape
    sequences: int
    context: int
    """Context tokens of each sequence."""
    dtype: str
    device: str
    cache: str = "auto"
    """The KV-cache format, as `kv_cache_dtype`."""


def attention_seconds(
    decodes: Decodes, sizes: Sequence[int], clock: Callable[[], float]
) -> Mapping[int, float]:
    """Seconds per call by block size."""
    calls = {size: partial(_timed, _call(decodes, size), clock, decodes.device) for size in sizes}
    turns = in_turns(calls, ROUNDS + 1)  # one extra for warm-up and compilation
    return {size: min(seconds) for size, seconds in turns.items()}


def _call(decodes: Decodes, size: int) -> Callable[[], object]:
    """The kernel over randomly scattered blocks."""
    import torch

    from pagedsim.experiments.benchmarks.shapes import Case, Problem

    shape, sequences, context = decodes.shape, decodes.sequences, decodes.context
    case = Case(shape, sequences, 1, context, size, decodes.cache)
    problem = Problem(case, getattr(torch, decodes.dtype), torch.device(decodes.device))

    def call() -> object:
        problem.batch = replace(problem.batch)  # one is good for one step
        return problem.attend()

    return call


def _timed(call: Callable[[], object], clock: Callable[[], float], device: str) -> float:
    import torch

    start = clock()
    for _ in range(CALLS):
        call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (clock() - start) / CALLS


# -- figure ----------------------------------------------------------------------------------------


def draw_sizes(sizes: Sequence[int], values: Mapping[str, Sequence[Estimate]]) -> Figure:
    """A panel per metric, with intervals where they are known."""
    places = range(len(sizes))

    def more(panel: Sequence[Estimate], axes: Axes) -> None:
        bars = np.transpose([e.sides for e in panel])
        axes.errorbar(places, [e.mean for e in panel], bars, fmt="none", ecolor=MUTED, zorder=1)
        axes.set_xticks(places, [str(size) for size in sizes], fontsize=8)

    panels = [
        Panel(
            lines={"": (places, [value.mean for value in estimates])},
            title=title,
            x="block size (tokens)",
            more=partial(more, estimates),
        )
        for title, estimates in values.items()
    ]
    return draw_panels(panels, 3)
