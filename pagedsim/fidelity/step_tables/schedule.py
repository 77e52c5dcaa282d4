"""The steps of a row, planned once by the scheduler, independently of their duration.

Requests that arrive all at once, or each after another's answer, are planned in the same steps
however long these take. So a measured time is a weighted sum of step times, and any cost model can
be evaluated without planning again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.fidelity.step_tables.protocol import Protocol, pool_of, server_of
from pagedsim.fidelity.step_tables.tables import Cell, Metric
from pagedsim.server import ServerSpec
from pagedsim.sim.capacity import sized
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload
from pagedsim.workload.draws import stream
from pagedsim.workload.tokens import PrefixedPrompts

Floats = NDArray[np.float64]

FITS, PREEMPTS, TOO_LARGE = "", "preempts", "does not fit"
STEP_TOKENS = 8192
"""Tokens of a step at most, of a batch: prompts in more steps take as long together."""
BATCH_POOL = "vllm-0.6"
"""The rule by which servers of a batch size their pool: those of tables are of about its time."""
SPARE = 0.02
"""The part of the blocks that a plan must leave free for memory not to have shaped it: more than
the watermark of `prefill_first`."""
_A_DOUBLING = 32
"""Bins per doubling of a step's totals: steps are merged within about 2 %."""


class Schedule(NamedTuple):
    """A row's steps, and what each counts for."""

    totals: Floats
    """A step, or several alike, a row: Totals up to `step`."""
    weights: Mapping[Metric, Floats]
    mark: str
    """Why the server could not run the row as the table says; FITS if it could."""
    ahead: NDArray[np.bool_]
    """Whether each was planned while the one before ran."""


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
    mark = FITS if _holds(cell) else TOO_LARGE
    return Schedule(totals, weights, mark, np.zeros(len(totals), bool))


def _holds(cell: Cell) -> bool:
    """Whether the memory has room for all of its requests at their longest."""
    server = server_for(cell)
    try:
        server = replace(server, max_model_len=None)
        complete = sized(server, cell.replica, **RowRequests.of(cell).pool)
    except ConfigError:
        return False
    assert complete.blocks is not None
    return complete.blocks >= _blocks_of_all(cell, server)


def _blocks_of_all(row: Cell | RowRequests, server: ServerSpec) -> int:
    """Blocks of all of its requests at their longest."""
    return row.at_once * -(-(row.prompt + row.output) // server.block_size)


def server_for(cell: Cell) -> ServerSpec:
    """The limits of the server software before the GPUs."""
    server = RowRequests.of(cell).server
    return replace(server, tensor_parallel=cell.tensor_parallel)


# -- steps of a scheduler --------------------------------------------------------------------------


def _planned(cell: Cell) -> Schedule:
    """All steps of a row's requests; with ample memory if the server's does not suffice."""
    requests, server = RowRequests.of(cell), server_for(cell)
    ample, needed = _with_ample_memory(requests)
    try:
        replica = replace(cell.replica, block_size=server.block_size)
        fitting = sized(server, replica, **requests.pool)
    except ConfigError:
        return ample._replace(mark=TOO_LARGE)
    assert fitting.blocks is not None
    if needed <= (1 - SPARE) * fitting.blocks:
        return ample
    return _run(requests, fitting).schedule()


@cache
def _with_ample_memory(requests: RowRequests) -> tuple[Schedule, int]:
    """The plan with ample memory, which rows with the same requests share, and the blocks it
    takes."""
    server = requests.server
    kept = requests.distinct_blocks(server.block_size)
    steps = _run(requests, replace(server, blocks=2 * _blocks_of_all(requests, server) + kept))
    return steps.schedule(), steps.needed + kept


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
    """A row's requests, and the limits of their server: all at once, or in a closed loop."""

    prompt: int
    output: int
    at_once: int
    step_tokens: int
    protocol: Protocol | None
    """Of a closed loop."""
    hardware: str
    """The GPU, which some limits of a closed loop's server depend on."""

    @classmethod
    def of(cls, cell: Cell) -> RowRequests:
        tokens = min(cell.model.max_model_len, STEP_TOKENS)
        loop = cell.protocol is not None
        hardware = cell.hardware.name if loop else ""
        sizes = cell.prompt, cell.output, cell.at_once
        return cls(*sizes, 0 if loop else tokens, cell.protocol, hardware)

    @property
    def server(self) -> ServerSpec:
        """The server software, with policies of its own."""
        longest = self.prompt + self.output
        if self.protocol is not None:
            return self.protocol.limited(server_of(self.protocol.server, self.hardware), longest)
        tokens = max(self.step_tokens, longest)
        return ServerSpec(max_batched_tokens=tokens, max_model_len=longest)

    @property
    def pool(self) -> Mapping[str, Any]:
        """The rule by which it sizes its pool."""
        if self.protocol is None:
            return {"pool": BATCH_POOL}
        return pool_of(self.protocol.server, self.hardware)

    @cached_property
    def workload(self) -> Workload:
        protocol = self.protocol
        if protocol is None:
            at_once = np.zeros(self.at_once)
            return Workload.of(at_once, self.prompt, self.output, mode="burst")
        rows = (protocol.warmup + protocol.rounds) * self.at_once
        drawn = stream(0, "step tables")
        prompt, output = (
            drawn.integers(int(protocol.shortest * most), most + 1, rows)
            for most in (max(self.prompt, 2), self.output)
        )
        alone = np.full(rows, -1, np.int32)
        turns = (np.arange(rows) % (protocol.unique_prompts or rows)).astype(np.int32)
        contents = PrefixedPrompts(alone, alone, prompt.astype(np.int32), turns)
        sizes = np.zeros(rows), prompt, output
        return Workload.of(*sizes, mode="closed", users=self.at_once, prompts=contents)

    @property
    def tokens(self) -> int:
        """The output of all requests, by which the time to plan them goes."""
        rounds = 1 if self.protocol is None else self.protocol.warmup + self.protocol.rounds
        return rounds * self.at_once * self.output

    @property
    def unmeasured(self) -> int:
        """Requests of the warm-up, which come first."""
        return 0 if self.protocol is None else self.protocol.warmup * self.at_once

    def distinct_blocks(self, block_size: int) -> int:
        """Blocks of the prompts that are used in turn."""
        unique = self.protocol and self.protocol.unique_prompts
        return (unique or 0) * -(-self.prompt // block_size)


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
        row = tokens + decodes, sequences, plan.prefill_pairs, read, plan.decode_context, 1
        self._rows.append((*row, plan.ahead))
        self._ends.append(end)
        self.needed = max(self.needed, used_blocks)

    def left(self, request: Request) -> None:
        if int(request.id) < self._requests.unmeasured:
            return
        first_token, ended = request.first_token_at, request.finished_at
        assert request.arrival is not None and first_token is not None and ended is not None
        output = self._requests.workload.output_len[int(request.id)]
        self._spans.append((request.arrival, first_token, ended, output))

    def schedule(self) -> Schedule:
        """All steps, and the weight of each in the measured metrics."""
        ends, spans = np.array(self._ends), np.array(self._spans)
        weights: dict[Metric, Floats] = {"latency": np.ones(len(ends))}
        if self._requests.protocol is not None:
            came, first, ended = (np.searchsorted(ends, spans[:, at]) for at in range(3))
            came = np.where(spans[:, 0] == 0.0, 0, came + 1)
            weight = np.full(len(spans), 1.0 / len(spans))
            first_token = _during(len(ends), came, first, weight)
            token = _during(len(ends), first + 1, ended, weight / (spans[:, 3] - 1))
            e2e = first_token + (self._requests.output - 1) * token
            weights |= {"ttft": first_token, "tpot": token, "e2e": e2e}
        rows, weights = _together(np.array(self._rows, dtype=float), weights)
        mark = PREEMPTS if self._preempted else FITS
        return Schedule(rows[:, :-1], weights, mark, rows[:, -1] > 0)


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
    """Merge steps whose totals are all within about 2 %, with the sum of their weights.

    The mean of such steps represents them: within so little, times are all but linear in totals.
    """
    bins = np.floor(_A_DOUBLING * np.log2(1.0 + rows))
    _, group = np.unique(bins, axis=0, return_inverse=True)
    group = group.ravel()
    counts = np.bincount(group).astype(float)
    means = [np.bincount(group, rows[:, at]) / counts for at in range(rows.shape[1])]
    summed: dict[Metric, Floats] = {
        metric: np.bincount(group, weight).astype(float) for metric, weight in weights.items()
    }
    return np.stack(means, axis=1), summed
