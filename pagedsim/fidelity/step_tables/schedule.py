"""The steps of a row: planned once by the scheduler, whatever time they then are said to take.

Requests that come all at once, or one after another's answer, are planned in the same steps however
long these take. So a measured time is a weighted sum of the steps' times, and any cost model can be
held against it without planning again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.core.source import Job, Mode
from pagedsim.fidelity.step_tables.tables import SHORTEST, Cell, Metric
from pagedsim.server import ServerSpec
from pagedsim.sim.capacity import sized
from pagedsim.sim.cost import Roofline
from pagedsim.sim.simulate import simulate
from pagedsim.sim.stack import Stack
from pagedsim.workload.draws import stream

Floats = NDArray[np.float64]

FITS, PREEMPTS, TOO_LARGE = "", "preempts", "does not fit"
STEP_TOKENS = 8192
"""Of a step, at most: from there on prompts in more steps take as long as in one."""
LOOP_REQUESTS = 10
"""Requests of a closed loop, for each that is there at a time."""
LOOP_SEQS = 512
"""As many as run at a time in a loop."""
_A_DOUBLING = 32
"""Decodes of as many sequences stand together where their contexts are within so small a part of a
doubling, about 2 %."""


class Schedule(NamedTuple):
    """A row's steps, and what each counts for."""

    totals: Floats
    """A step, or several alike, a row: Totals up to `step`."""
    weights: Mapping[Metric, Floats]
    mark: str
    """Why the server could not run it as the table says; FITS where it could."""


def scheduled(cell: Cell) -> Schedule:
    """The steps that a row's measurements are made of."""
    if cell.way == "steps":
        return _two_steps(cell)
    steps, mark = _planned(cell)
    rows, weights = np.array(steps.rows, dtype=float), steps.weights(cell)
    return Schedule(*_together(rows, weights), mark)


def _two_steps(cell: Cell) -> Schedule:
    """The prompts in one step, and the one in the middle of their answers."""
    prompt, count = cell.prompt, cell.at_once
    held = count * (prompt + cell.output / 2)
    totals = np.array(
        [
            [prompt * count, count, count * prompt * (prompt + 1) / 2, 0, 0, 1],
            [count, count, 0, 0, held, 1],
        ]
    )
    first, second = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    weights: dict[Metric, Floats] = {
        metric: second if metric == "token" else first for metric in cell.measured
    }
    return Schedule(totals, weights, FITS if _holds(cell) else TOO_LARGE)


def _holds(cell: Cell) -> bool:
    """Whether the memory has room for all of its requests at their longest."""
    server = server_of(cell)
    try:
        found = sized(replace(server, max_model_len=None), cell.replica)
    except ConfigError:
        return False
    assert found.blocks is not None
    longest = -(-(cell.prompt + cell.output) // server.block_size)
    return found.blocks >= cell.at_once * longest


def server_of(cell: Cell) -> ServerSpec:
    """What stands in front of the GPUs."""
    longest = cell.prompt + cell.output
    if cell.way == "loop":
        return ServerSpec(
            batching="unified",
            max_seqs=LOOP_SEQS,
            max_batched_tokens=STEP_TOKENS,
            max_model_len=longest,
            tensor_parallel=cell.tensor_parallel,
        )
    tokens = min(cell.model.max_model_len, STEP_TOKENS)
    return ServerSpec(
        max_batched_tokens=max(tokens, longest),
        max_model_len=longest,
        tensor_parallel=cell.tensor_parallel,
    )


def _planned(cell: Cell) -> tuple[_Steps, str]:
    """All steps of a row's requests, where need be with as much memory as they want."""
    server = server_of(cell)
    try:
        fitting = sized(server, cell.replica)
    except ConfigError:
        wanted = cell.at_once * (cell.prompt + cell.output)
        ample = replace(server, blocks=2 * wanted // server.block_size)
        return _run(cell, ample), TOO_LARGE
    steps = _run(cell, fitting)
    return steps, PREEMPTS if steps.preempted else FITS


def _run(cell: Cell, server: ServerSpec) -> _Steps:
    requests = RowRequests.of(cell)
    steps = _Steps([output for _, output in requests.sizes])
    cost = Roofline(cell.replica, stack=Stack(server_ms=0.0))
    simulate(server.scheduler(), requests, cost, steps)
    return steps


@dataclass(frozen=True)
class RowRequests:
    """A row's requests as a workload."""

    sizes: Sequence[tuple[int, int]]
    mode: Mode
    users: int | None
    think_time: float = 0.0
    turns: None = None

    @classmethod
    def of(cls, cell: Cell) -> RowRequests:
        """As many as come at once, or ten times as many, one after the other."""
        prompt, output, count = cell.prompt, cell.output, cell.at_once
        if cell.way == "batch":
            return cls([(prompt, output)] * count, "burst", None)
        drawn, wanted = stream(0, "step tables"), LOOP_REQUESTS * count
        prompts, outputs = (
            drawn.integers(int(SHORTEST * most), most + 1, wanted).tolist()
            for most in (max(prompt, 2), output)
        )
        return cls(list(zip(prompts, outputs, strict=True)), "closed", count)

    def requests(self) -> Iterator[Job]:
        for number, (prompt, output) in enumerate(self.sizes):
            yield Request(number, prompt, arrival=0.0), output


class _Steps:
    """A recorder of what each step computes, and of which requests are there meanwhile."""

    def __init__(self, outputs: Sequence[int]) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.ends: list[float] = []
        self.preempted = 0
        self._outputs = outputs
        self._plan: StepPlan | None = None
        self._spans: list[tuple[float, float, float, int]] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._plan = plan
        self.preempted += len(plan.preempted)
        self._add(end)

    def again(self, end: float, used_blocks: int) -> None:
        self._add(end)

    def left(self, request: Request) -> None:
        begun, ended = request.first_token_at, request.finished_at
        assert request.arrival is not None and begun is not None and ended is not None
        self._spans.append((request.arrival, begun, ended, self._outputs[int(request.id)]))

    def _add(self, end: float) -> None:
        plan = self._plan
        assert plan is not None
        tokens, decodes = plan.prefill_tokens, plan.decode_count
        sequences = len(plan.chunks) + decodes
        read = plan.prefill_context - tokens
        self.rows.append(
            (tokens + decodes, sequences, plan.prefill_pairs, read, plan.decode_context, 1)
        )
        self.ends.append(end)

    def weights(self, cell: Cell) -> dict[Metric, Floats]:
        """How often each step counts in what was measured."""
        ends, spans = np.array(self.ends), np.array(self._spans)
        came, begun, ended = (np.searchsorted(ends, spans[:, at]) for at in range(3))
        came = np.where(spans[:, 0] == 0.0, 0, came + 1)
        each = 1.0 / len(spans)
        found: dict[Metric, Floats] = {}
        for metric in cell.measured:
            if metric == "latency":
                found[metric] = np.ones(len(ends))
            elif metric == "ttft":
                found[metric] = _during(len(ends), came, begun, np.full(len(spans), each))
            else:
                found[metric] = _during(len(ends), begun + 1, ended, each / (spans[:, 3] - 1))
        return found


def _during(
    count: int, first: NDArray[np.int64], last: NDArray[np.int64], weight: Floats
) -> Floats:
    """What each of `count` steps counts, from each request's first such step to its last."""
    edges = np.zeros(count + 1)
    np.add.at(edges, first, weight)
    np.add.at(edges, last + 1, -weight)
    return np.cumsum(edges)[:count]


def _together(
    rows: Floats, weights: Mapping[Metric, Floats]
) -> tuple[Floats, dict[Metric, Floats]]:
    """Steps that are alike in one row, which weighs as much as they do together.

    Those of prompts stay as they are. The time of decodes of as many sequences is linear in their
    context, so that their mean stands for them.
    """
    plain = rows[:, 4] * (rows[:, 0] == rows[:, 1]) * (rows[:, 2] == 0)
    bins = np.floor(_A_DOUBLING * np.log2(np.maximum(plain, 1.0)))
    own = np.where(plain > 0, 0, np.arange(1, len(rows) + 1))
    keys = np.stack([own, rows[:, 1], bins], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.ravel()
    counts = np.bincount(group).astype(float)
    means = [np.bincount(group, rows[:, at]) / counts for at in range(rows.shape[1])]
    summed: dict[Metric, Floats] = {
        metric: np.bincount(group, weight).astype(float) for metric, weight in weights.items()
    }
    return np.stack(means, axis=1), summed
