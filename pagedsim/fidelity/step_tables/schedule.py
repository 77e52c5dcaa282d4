"""The steps of a row, planned once by the scheduler, independently of their duration.

Requests that arrive all at once, or each after another's answer, are planned in the same steps
however long these take. So a measured time is a weighted sum of step times, and any cost model can
be evaluated without planning again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.fidelity.step_tables.tables import SHORTEST, Cell, Metric
from pagedsim.server import ServerSpec
from pagedsim.sim.capacity import sized
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload
from pagedsim.workload.draws import stream

Floats = NDArray[np.float64]

FITS, PREEMPTS, TOO_LARGE = "", "preempts", "does not fit"
STEP_TOKENS = 8192
"""Tokens of a step at most: prompts in more steps take as long together."""
LOOP_REQUESTS = 10
"""Requests of a closed loop for each concurrent one."""
LOOP_SEQS = 512
"""As many as run at a time in a loop."""
SPARE = 0.02
"""The part of the blocks that a plan must leave free for memory not to have shaped it: more than
the watermark of `prefill_first`."""
_A_DOUBLING = 32
"""Bins per doubling of the context: decodes of as many sequences are merged within about 2 %."""


class Schedule(NamedTuple):
    """A row's steps, and what each counts for."""

    totals: Floats
    """A step, or several alike, a row: Totals up to `step`."""
    weights: Mapping[Metric, Floats]
    mark: str
    """Why the server could not run the row as the table says; FITS if it could."""


def scheduled(cell: Cell) -> Schedule:
    """The steps whose times make up a row's measurements."""
    return _two_steps(cell) if cell.way == "steps" else _planned(cell)


def _two_steps(cell: Cell) -> Schedule:
    """The prefill in one step, and the decode step in the middle of the answers."""
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
        complete = sized(replace(server, max_model_len=None), cell.replica)
    except ConfigError:
        return False
    assert complete.blocks is not None
    return complete.blocks >= _blocks_of_all(cell, server)


def _blocks_of_all(row: Cell | RowRequests, server: ServerSpec) -> int:
    """Blocks of all of its requests at their longest."""
    return row.at_once * -(-(row.prompt + row.output) // server.block_size)


def server_of(cell: Cell) -> ServerSpec:
    """The limits of the server software before the GPUs."""
    server = _server(RowRequests.of(cell), min(cell.model.max_model_len, STEP_TOKENS))
    return replace(server, tensor_parallel=cell.tensor_parallel)


def _server(requests: RowRequests, tokens: int) -> ServerSpec:
    """The limits of the server software for these requests, with at most `tokens` in a step."""
    longest = requests.prompt + requests.output
    if requests.loop:
        return ServerSpec(
            batching="unified",
            max_seqs=LOOP_SEQS,
            max_batched_tokens=STEP_TOKENS,
            max_model_len=longest,
        )
    return ServerSpec(max_batched_tokens=max(tokens, longest), max_model_len=longest)


# -- steps of a scheduler --------------------------------------------------------------------------


def _planned(cell: Cell) -> Schedule:
    """All steps of a row's requests; with ample memory if the server's does not suffice."""
    requests, server = RowRequests.of(cell), server_of(cell)
    tokens = min(cell.model.max_model_len, STEP_TOKENS)
    ample, needed = _with_ample_memory(requests, tokens)
    try:
        fitting = sized(server, cell.replica)
    except ConfigError:
        return ample._replace(mark=TOO_LARGE)
    assert fitting.blocks is not None
    if needed <= (1 - SPARE) * fitting.blocks:
        return ample
    return _run(requests, fitting).schedule()


@cache
def _with_ample_memory(requests: RowRequests, tokens: int) -> tuple[Schedule, int]:
    """The plan with ample memory, which rows with the same requests share, and the blocks it
    takes."""
    server = _server(requests, tokens)
    steps = _run(requests, replace(server, blocks=2 * _blocks_of_all(requests, server)))
    return steps.schedule(), steps.needed


def _run(requests: RowRequests, server: ServerSpec) -> _Steps:
    steps = _Steps(requests)
    simulate(server.scheduler(), requests.workload, _Even(), steps)
    return steps


class _Even:
    """Step times that are all the same, since no plan depends on them."""

    def step_seconds(self, plan: StepPlan) -> float:
        return 1.0

    def decode_seconds(self, sequences: int, context: int) -> float:
        return 1.0

    def swap_seconds(self, blocks: int) -> float:
        return 0.0


@dataclass(frozen=True)
class RowRequests:
    """A row's requests: all at once, or ten times as many, one after the other."""

    loop: bool
    prompt: int
    output: int
    at_once: int

    @classmethod
    def of(cls, cell: Cell) -> RowRequests:
        return cls(cell.way == "loop", cell.prompt, cell.output, cell.at_once)

    @cached_property
    def workload(self) -> Workload:
        if not self.loop:
            at_once = np.zeros(self.at_once)
            return Workload.of(at_once, self.prompt, self.output, mode="burst")
        drawn, wanted = stream(0, "step tables"), LOOP_REQUESTS * self.at_once
        lengths = [
            drawn.integers(int(SHORTEST * most), most + 1, wanted)
            for most in (max(self.prompt, 2), self.output)
        ]
        return Workload.of(np.zeros(wanted), *lengths, mode="closed", users=self.at_once)


class _Steps:
    """Records what each step computes, and which requests are in the server during it."""

    def __init__(self, requests: RowRequests) -> None:
        self.needed = 0
        """Blocks in use at most."""
        self._requests = requests
        self._rows: list[tuple[int, ...]] = []
        self._ends: list[float] = []
        self._preempted = 0
        self._plan: StepPlan | None = None
        self._spans: list[tuple[float, float, float, int]] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._plan = plan
        self._preempted += len(plan.preempted)
        self.again(end, plan.used_blocks)

    def again(self, end: float, used_blocks: int) -> None:
        plan = self._plan
        assert plan is not None
        tokens, decodes = plan.prefill_tokens, plan.decode_count
        sequences = len(plan.chunks) + decodes
        read = plan.prefill_context - tokens
        self._rows.append(
            (tokens + decodes, sequences, plan.prefill_pairs, read, plan.decode_context, 1)
        )
        self._ends.append(end)
        self.needed = max(self.needed, used_blocks)

    def left(self, request: Request) -> None:
        first_token, ended = request.first_token_at, request.finished_at
        assert request.arrival is not None and first_token is not None and ended is not None
        output = self._requests.workload.output_len[int(request.id)]
        self._spans.append((request.arrival, first_token, ended, output))

    def schedule(self) -> Schedule:
        """All steps, and the weight of each in the measured metrics."""
        ends, spans = np.array(self._ends), np.array(self._spans)
        weights: dict[Metric, Floats] = {"latency": np.ones(len(ends))}
        if self._requests.loop:
            came, first, ended = (np.searchsorted(ends, spans[:, at]) for at in range(3))
            came = np.where(spans[:, 0] == 0.0, 0, came + 1)
            weight = np.full(len(spans), 1.0 / len(spans))
            weights = {
                "ttft": _during(len(ends), came, first, weight),
                "tpot": _during(len(ends), first + 1, ended, weight / (spans[:, 3] - 1)),
            }
        together = _together(np.array(self._rows, dtype=float), weights)
        return Schedule(*together, PREEMPTS if self._preempted else FITS)


def _during(
    count: int, first: NDArray[np.int64], last: NDArray[np.int64], weight: Floats
) -> Floats:
    """The weight of each of `count` steps, from each request's first such step to its last."""
    edges = np.zeros(count + 1)
    np.add.at(edges, first, weight)
    np.add.at(edges, last + 1, -weight)
    return np.cumsum(edges)[:count]


def _together(
    rows: Floats, weights: Mapping[Metric, Floats]
) -> tuple[Floats, dict[Metric, Floats]]:
    """Merge steps that are alike, with the sum of their weights.

    Steps with prompts stay as they are. The time of decodes of as many sequences is linear in their
    context, so their mean context represents them.
    """
    plain = rows[:, 4] * (rows[:, 0] == rows[:, 1]) * (rows[:, 2] == 0)
    bins = np.floor(_A_DOUBLING * np.log2(np.maximum(plain, 1.0)))
    single = np.where(plain > 0, 0, np.arange(1, len(rows) + 1))
    keys = np.stack([single, rows[:, 1], bins], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.ravel()
    counts = np.bincount(group).astype(float)
    means = [np.bincount(group, rows[:, at]) / counts for at in range(rows.shape[1])]
    summed: dict[Metric, Floats] = {
        metric: np.bincount(group, weight).astype(float) for metric, weight in weights.items()
    }
    return np.stack(means, axis=1), summed
