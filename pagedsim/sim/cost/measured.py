"""A step as the sum of its kernels, measured by shape on the same GPU, and the host's work."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, StepPlan
from pagedsim.core.errors import require_number, unknown
from pagedsim.sim.cost.base import BUS_EFFICIENCY, Breakdown, CostModel, Term, kind_of, move_seconds
from pagedsim.sim.cost.kernels import StepKernels, kernels_of
from pagedsim.sim.cost.tables import KernelTables, installed
from pagedsim.sim.cost.terms import Totals, hidden
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack

LOADS = ("balanced", "power_law_1.01", "power_law_1.2")
"""How tokens choose experts in the tables."""


class Chunks(NamedTuple):
    """The prompts of a step, taken to be alike."""

    prompts: float
    tokens: float
    """Of each."""
    before: float
    """Tokens of each that were computed before."""


def chunks_of(totals: Totals) -> Chunks:
    """Count, tokens and context of the chunks alike that have these totals.

    Of `count` chunks of n tokens after c, `token - sequence` is count · (n - 1), however many
    decodes there are, `chunk_context` count · c, and `pair` count · n · (c + (n + 1) / 2).

    >>> chunks_of(Totals(token=340, sequence=43, pair=3 * 100 * (50 + 50.5), chunk_context=150))
    Chunks(prompts=3.0, tokens=100.0, before=50.0)
    """
    further, context, pairs = totals.token - totals.sequence, totals.chunk_context, totals.pair
    if further <= 0:  # of one token each
        count = max(pairs - context, 1.0)
        return Chunks(count, 1.0, context / count)
    half = further / 2 + context
    middle = pairs + context - further / 2
    tokens = (middle + sqrt(max(middle * middle - 4.0 * half * pairs, 0.0))) / (2.0 * half)
    count = further / (tokens - 1.0) if tokens > 1.0 else 1.0
    return Chunks(count, tokens, context / count)


class _Line(NamedTuple):
    """Seconds of decodes by their total context: straight between `contexts`."""

    contexts: list[float]
    seconds: list[float]
    slopes: list[float]


class Measured(CostModel):
    """A step is the sum of its kernels, each measured by shape, and the host's work around them.

    Kernels whose time goes with the step's tokens are a curve of them, the LM head of sequences.
    Attention of prompts is that of as many chunks alike, and attention of decodes that of sequences
    of the mean context. Sizes between those measured are interpolated (`grids.py`).

    `tables` is a folder of tables, None the installed ones of aiconfigurator-core, of the `stack`'s
    framework and its nearest version. Host time, the front end and the part of the bus are as in
    `Roofline`; `stack.layer_us` is not added, since kernels are there one by one. `expert_load` is
    how unevenly tokens choose experts.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        stack: Stack | None = None,
        tables: str | None = None,
        expert_load: str = "power_law_1.01",
        host_step_ms: float | None = None,
        host_request_us: float | None = None,
    ) -> None:
        super().__init__(replica)
        if not isinstance(stack := Stack() if stack is None else stack, Stack):
            raise ConfigError(f"cost.stack={stack}: must be settings with a _target_")
        for name, least in (("host_step_ms", host_step_ms), ("host_request_us", host_request_us)):
            if least is not None:
                require_number(f"cost.{name}", least, 0)
        if expert_load not in LOADS:
            raise unknown("cost.expert_load", str(expert_load), LOADS)
        if replica.more_than_shared:
            raise ConfigError(f"{replica.split}: cost=measured has tensor_parallel alone")
        self.kernels = _kernels(replica, tables, stack.name, expert_load)
        self.server_seconds = stack.server_ms * 1e-3
        self._step = (stack.host_step_ms if host_step_ms is None else host_step_ms) * 1e-3
        request_us = stack.host_request_us if host_request_us is None else host_request_us
        self._sequence = request_us * 1e-6
        self._layers = replica.model.layers
        self._move = move_seconds(replica, BUS_EFFICIENCY)
        self._by_tokens: dict[float, float] = {}
        self._by_sequences: dict[float, float] = {}
        self._decodes: dict[float, _Line] = {}

    @property
    def notices(self) -> list[str]:
        return list(self.kernels.notices)

    def swap_seconds(self, blocks: int) -> float:
        return blocks * self._move

    def step_seconds(self, plan: StepPlan) -> float:
        if plan.prefill_tokens:
            totals = totals_of(plan)
            gpu, host = self._gpu(totals), self._host(totals.sequence)
        else:
            gpu = self._decode(plan.decode_count, plan.decode_context)
            host = self._host(plan.decode_count)
        return max(gpu, host) if plan.ahead else gpu + host

    def decode_seconds(self, sequences: int, context: int) -> float:
        return self._decode(sequences, context) + self._host(sequences)

    def recompute_seconds(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        totals = Totals(token=tokens, sequence=1, pair=tokens * (tokens + 1) // 2, step=1)
        return self._gpu(totals) + self._host(1)

    def seconds_of(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """`step_seconds` of many steps, one per row, with the columns of `Totals` up to `step`."""
        distinct, places = np.unique(steps, axis=0, return_inverse=True)
        rows = [Totals(*row) for row in distinct.tolist()]
        seconds = [self._gpu(totals) + self._host(totals.sequence) for totals in rows]
        return np.array(seconds)[places]

    # Seconds of the GPU

    def _gpu(self, totals: Totals) -> float:
        if not totals.pair:
            return self._decode(totals.sequence, totals.decode_context)
        seconds = self._of_tokens(totals.token) + self._of_sequences(totals.sequence)
        chunks = chunks_of(totals)
        seconds += self._chunks(chunks)
        if totals.decode_context:
            seconds += self._mixed(totals, chunks)
        return seconds

    def _host(self, sequences: float) -> float:
        return sequences * self._sequence + self._step

    def _of_tokens(self, tokens: float) -> float:
        try:
            return self._by_tokens[tokens]
        except KeyError:
            seconds = sum(kernel.of(tokens) for kernel in self.kernels.by_tokens)
            return self._by_tokens.setdefault(tokens, seconds)

    def _of_sequences(self, sequences: float) -> float:
        try:
            return self._by_sequences[sequences]
        except KeyError:
            seconds = sum(kernel.of(sequences) for kernel in self.kernels.by_sequences)
            return self._by_sequences.setdefault(sequences, seconds)

    def _chunks(self, chunks: Chunks) -> float:
        """Attention of chunks: a part of that of the whole prompts up to them, as many as its pairs
        are of theirs, but at least what decodes at the same place take to read their context."""
        length = chunks.tokens + chunks.before
        whole = self.kernels.chunks.seconds(chunks.prompts, length)
        if not chunks.before:
            return self._layers * whole
        share = 1.0 - chunks.before * (chunks.before + 1.0) / (length * (length + 1.0))
        least = self.kernels.decodes.seconds(chunks.prompts, length)
        return self._layers * max(whole * share, least)

    def _mixed(self, totals: Totals, chunks: Chunks) -> float:
        """Attention of the decodes beside chunks."""
        decodes = max(round(totals.sequence - chunks.prompts), 1)
        alone = self._of_tokens(decodes) + self._of_sequences(decodes)
        return self._decode(decodes, totals.decode_context) - alone

    def _decode(self, sequences: float, context: float) -> float:
        try:
            contexts, seconds, slopes = self._decodes[sequences]
        except KeyError:
            line = self._decodes[sequences] = self._decode_line(sequences)
            contexts, seconds, slopes = line
        place = bisect_right(contexts, context) - 1
        return seconds[place] + (context - contexts[place]) * slopes[place]

    def _decode_line(self, sequences: float) -> _Line:
        """Steps of decodes alone. Beyond the longest measured context attention is proportional
        to it."""
        if not sequences:
            return _Line([0.0], [0.0], [0.0])
        attention = self.kernels.decodes
        lengths = attention.surface.lengths(sequences * attention.width)
        lengths = [0.0, *lengths]
        times = [
            self._layers * attention.seconds(sequences, length or lengths[1]) for length in lengths
        ]
        rest = self._of_tokens(sequences) + self._of_sequences(sequences)
        contexts = [sequences * length for length in lengths]
        slopes = np.diff(times) / np.diff(contexts)
        return _Line(
            contexts, [time + rest for time in times], [*slopes.tolist(), times[-1] / contexts[-1]]
        )

    # By kernel

    def explain(self, plan: StepPlan) -> Breakdown:
        terms = list(self._terms(plan))
        if plan.ahead:
            terms = list(hidden(terms, 0.0))
        return Breakdown(kind_of(plan), tuple(terms), self.work(plan))

    def _terms(self, plan: StepPlan) -> Iterator[Term]:
        totals = totals_of(plan)
        if totals.token:
            for kernels, size in (
                (self.kernels.by_tokens, totals.token),
                (self.kernels.by_sequences, totals.sequence),
            ):
                for kernel in kernels:
                    yield Term(kernel.name, kernel.of(size), kernel.bound_at(size))
            if totals.pair:
                chunks = chunks_of(totals)
                yield Term("attention", self._chunks(chunks), "compute")
                if totals.decode_context:
                    yield Term("decode attention", self._mixed(totals, chunks), "bandwidth")
            else:
                rest = self._of_tokens(totals.token) + self._of_sequences(totals.sequence)
                decodes = self._decode(totals.sequence, totals.decode_context) - rest
                yield Term("decode attention", decodes, "bandwidth")
        yield Term("host", self._host(totals.sequence), "host")


def totals_of(plan: StepPlan) -> Totals:
    """What a step's time grows with."""
    prompts, decodes = plan.prefill_tokens, plan.decode_count
    return Totals(
        token=prompts + decodes,
        sequence=len(plan.chunks) + decodes,
        pair=plan.prefill_pairs,
        chunk_context=plan.prefill_context - prompts,
        decode_context=plan.decode_context,
        step=1.0,
    )


def _kernels(replica: Replica, tables: str | None, stack: str, load: str) -> StepKernels:
    folder = installed() if tables is None else Path(tables)
    if not folder.is_dir():
        raise ConfigError(f"cost.tables={tables}: must be a folder")
    return kernels_of(replica, KernelTables(folder, replica.hardware.name, stack), load)
