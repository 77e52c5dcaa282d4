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
from pagedsim.core.errors import unknown
from pagedsim.sim.cost.base import Breakdown, CostModel, Term, kind_of
from pagedsim.sim.cost.kernels import Kernel, StepKernels, kernels_of
from pagedsim.sim.cost.profiled import profiled_kernels
from pagedsim.sim.cost.roofline import launches
from pagedsim.sim.cost.tables import KernelTables, installed
from pagedsim.sim.cost.terms import Share, Split, Totals, hidden
from pagedsim.sim.hardware import family_of
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack

_COLUMNS = ("sequence", "pair", "decode_context")
GAP_US = 1.0
"""From the end of a kernel to the beginning of the next, for a stack with `latencies` of 1.

Of 0, 1.0 and 1.4 in `experiment=truth cost=measured`, vLLM's and TensorRT-LLM's rows of fitted
groups are nearest at 1.0 to 1.4.
"""
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
    """The chunks alike that have these totals.

    Of p chunks of n tokens after c, `token - sequence` is p · (n - 1), however many decodes there
    are, `chunk_context` p · c, and `pair` p · n · (c + (n + 1) / 2).

    >>> chunks_of(Totals(token=340, sequence=43, pair=3 * 100 * (50 + 50.5), chunk_context=150))
    Chunks(prompts=3.0, tokens=100.0, before=50.0)
    """
    further, context, pairs = totals.token - totals.sequence, totals.chunk_context, totals.pair
    half = further / 2 + context
    middle = pairs + context - further / 2
    tokens, prompts = 1.0, max(pairs - context, 1.0)
    if further > 0:
        tokens = (middle + sqrt(max(middle * middle - 4.0 * half * pairs, 0.0))) / (2.0 * half)
        prompts = further / (tokens - 1.0) if tokens > 1.0 else prompts
    return Chunks(prompts, tokens, context / prompts)


class _Line(NamedTuple):
    """Seconds of decodes by their total context: straight between `contexts`."""

    contexts: list[float]
    seconds: list[float]
    slopes: list[float]
    host: float = 0.0
    launching: float = 0.0

    def at(self, context: float) -> float:
        """The GPU's seconds."""
        place = bisect_right(self.contexts, context) - 1
        return self.seconds[place] + (context - self.contexts[place]) * self.slopes[place]

    def many(self, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for many steps."""
        known, seconds, slopes = map(np.array, (self.contexts, self.seconds, self.slopes))
        places = np.searchsorted(known, contexts, side="right") - 1
        times: NDArray[np.float64] = seconds[places] + (contexts - known[places]) * slopes[places]
        return times


class Measured(CostModel):
    """A step is the sum of its kernels, each measured by shape, and the host's work around them.

    Kernels whose time goes with the step's tokens are a curve of them, the LM head of sequences.
    Attention of prompts is that of as many chunks alike, and attention of decodes that of sequences
    of the mean context. Sizes between those measured are interpolated (`grids.py`).

    `tables` is a folder of tables, None the installed ones of aiconfigurator-core, of the `stack`'s
    framework and its nearest version. Host time, launches of steps with prompts and the front end
    are the stack's, whose `latencies` lengthen the gaps between kernels. `expert_load` is how
    unevenly tokens choose experts. Pipelines and groups are those of `Split`.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        stack: Stack | None = None,
        tables: str | None = None,
        expert_load: str = "power_law_1.01",
    ) -> None:
        super().__init__(replica)
        if not isinstance(stack := Stack() if stack is None else stack, Stack):
            raise ConfigError(f"cost.stack={stack}: must be settings with a _target_")
        if expert_load not in LOADS:
            raise unknown("cost.expert_load", str(expert_load), LOADS)
        self.kernels = _kernels(replica, tables, stack, expert_load)
        lists = self.kernels.by_tokens, self.kernels.by_sequences, self.kernels.experts
        calls = replica.model.layers + sum(kernel.calls for some in lists for kernel in some)
        gap = GAP_US * stack.latencies * 1e-6
        gaps = Kernel("gaps between kernels", "launch", calls, lambda tokens: gap)
        self._lists = ((*lists[0], gaps), *lists[1:]) if gap else lists
        host = family_of(replica.hardware.family).launch
        self._launching = launches(replica.model, stack, host)
        """Seconds of launching a step's kernels, without prompts and with them."""
        self.server_seconds = stack.server_ms * 1e-3
        self._step, self._sequence = stack.host_step_ms * 1e-3, stack.host_request_us * 1e-6
        self._split = Split.of(replica, skew=1.0)
        self._sums: tuple[dict[float, float], ...] = ({}, {}, {})
        self._attention: dict[float, _Line] = {}
        self._decodes: dict[float, _Line] = {0: _Line([0.0], [0.0], [0.0], self._step)}

    @property
    def notices(self) -> list[str]:
        return list(self.kernels.notices)

    def step_seconds(self, plan: StepPlan) -> float:
        if plan.prefill_tokens:
            share = self._share(plan)
            gpu, host = self._gpu(share.part) * share.long, self._host(share.host)
            launching = self._launching[1] * share.long
        else:
            line = self._decode_line(plan.decode_count)
            gpu, host, launching = line.at(plan.decode_context), line.host, line.launching
        return max(gpu, launching + host) if plan.ahead else max(gpu, launching) + host

    def decode_seconds(self, sequences: int, context: int) -> float:
        try:
            contexts, seconds, slopes, host, launching = self._decodes[sequences]
        except KeyError:
            contexts, seconds, slopes, host, launching = self._decode_line(sequences)
        place = bisect_right(contexts, context) - 1  # `_Line.at` inlined: a call takes as long
        gpu = seconds[place] + (context - contexts[place]) * slopes[place]
        return (gpu if gpu > launching else launching) + host

    def seconds_of(
        self, steps: NDArray[np.float64], ahead: NDArray[np.bool_] | bool = False
    ) -> NDArray[np.float64]:
        """`step_seconds` of many steps, one per row, with the columns of `Totals` up to `step`;
        `ahead`: each was planned while the one before ran.

        Not for a split replica, where the lengths of individual chunks matter.
        """
        assert self._split is None
        gpu = np.empty(len(steps))
        sequences, pairs, contexts = (steps[:, i] for i in map(Totals._fields.index, _COLUMNS))
        for count in np.unique(sequences[pairs == 0]).tolist():
            rows, line = (sequences == count) & (pairs == 0), self._decode_line(count)
            gpu[rows] = line.many(contexts[rows])
        for row in np.flatnonzero(pairs).tolist():
            gpu[row] = self._gpu(Totals(*steps[row].tolist()))
        host = sequences * self._sequence + self._step
        launching = np.where(pairs > 0.0, self._launching[1], self._launching[0])
        in_turn = np.maximum(gpu, launching) + host
        return np.where(ahead, np.maximum(gpu, launching + host), in_turn)

    # Seconds of one GPU

    def _share(self, plan: StepPlan) -> Share:
        totals = totals_of(plan)
        longest = max((chunk.length for chunk in plan.chunks), default=0)
        return self._shared(totals, plan.prefill_tokens, longest)

    def _shared(self, totals: Totals, prompts: float, longest: float) -> Share:
        """The share of a GPU; its `routed` are the tokens of all groups."""
        if self._split is None or not totals.token:
            return Share(totals, totals, 1.0, 1.0)
        share = self._split.share(totals, prompts, longest)
        return share._replace(part=share.part._replace(routed=totals.token / share.passes))

    def _host(self, totals: Totals) -> float:
        return totals.sequence * self._sequence + self._step

    def _gpu(self, totals: Totals) -> float:
        return self._without_attention(totals) + sum(self._of_attention(totals))

    def _without_attention(self, totals: Totals) -> float:
        sizes = self._sizes(totals)
        try:
            return sum(known[size] for known, size in zip(self._sums, sizes, strict=True))
        except KeyError:
            for known, kernels, size in zip(self._sums, self._lists, sizes, strict=True):
                known[size] = sum(kernel.of(size) for kernel in kernels)
            return self._without_attention(totals)

    @staticmethod
    def _sizes(totals: Totals) -> tuple[float, float, float]:
        """What the kernels of each list go by."""
        return totals.token, totals.sequence, totals.routed or totals.token

    def _of_attention(self, totals: Totals) -> tuple[float, float]:
        """Attention of chunks, and of decodes."""
        decodes, of_chunks = totals.sequence, 0.0
        if totals.pair:
            chunks = chunks_of(totals)
            of_chunks = self.replica.model.layers * self.kernels.chunks(*chunks)
            if not totals.decode_context:
                return of_chunks, 0.0
            decodes = max(round(decodes - chunks.prompts), 1)
        return of_chunks, self._attention_line(decodes).at(totals.decode_context)

    def _attention_line(self, sequences: float) -> _Line:
        """Attention of decodes. Beyond the longest measured context it is proportional to it."""
        try:
            return self._attention[sequences]
        except KeyError:
            attention, layers = self.kernels.decodes, self.replica.model.layers
            lengths = [0.0, *attention.lengths(sequences)]
            seconds = [layers * attention(sequences, length) for length in lengths]
            contexts = [sequences * length for length in lengths]
            slopes = [*np.diff(seconds) / np.diff(contexts), seconds[-1] / contexts[-1]]
            line = _Line(contexts, seconds, list(map(float, slopes)))
            return self._attention.setdefault(sequences, line)

    def _decode_line(self, sequences: float) -> _Line:
        """Steps of decodes alone."""
        try:
            return self._decodes[sequences]
        except KeyError:
            totals = Totals(token=sequences, sequence=sequences, decode_context=1.0, step=1.0)
            share = self._shared(totals, 0, 0)
            part, long = share.part, share.long
            attention, rest = self._attention_line(part.sequence), self._without_attention(part)
            line = _Line(
                [context / part.decode_context for context in attention.contexts],
                [(seconds + rest) * long for seconds in attention.seconds],
                [slope * part.decode_context * long for slope in attention.slopes],
                self._host(share.host),
                self._launching[0] * long,
            )
            return self._decodes.setdefault(sequences, line)

    # By kernel

    def explain(self, plan: StepPlan) -> Breakdown:
        share = self._share(plan)
        terms = list(self._terms(share.part)) if share.part.token else []
        busy = share.passes / self._split.stages if self._split else 1.0
        idle = (share.long - busy) * sum(term.seconds for term in terms)
        terms = [term._replace(seconds=term.seconds * busy) for term in terms]
        if idle > 1e-12:
            terms.append(Term("bubbles", idle, "pipeline"))
        launching = self._launching[plan.prefill_tokens > 0] * share.long if terms else 0.0
        if (gpu := sum(term.seconds for term in terms)) < launching:
            terms.append(Term("launches", launching - gpu, "launch"))
        terms.append(Term("host", self._host(share.host), "host"))
        if plan.ahead:
            terms = list(hidden(terms, launching))
        return Breakdown(kind_of(plan), tuple(terms), self.work(plan))

    def _terms(self, totals: Totals) -> Iterator[Term]:
        for kernels, size in zip(self._lists, self._sizes(totals), strict=True):
            for kernel in kernels:
                yield Term(kernel.name, kernel.of(size), kernel.bound_at(size))
        chunks, decodes = self._of_attention(totals)
        if totals.pair:
            yield Term("attention", chunks, "compute")
        if totals.decode_context:
            yield Term("decode attention", decodes, "bandwidth")


def totals_of(plan: StepPlan) -> Totals:
    """What a step's time grows with."""
    prompts, decodes = plan.prefill_tokens, plan.decode_count
    return Totals(
        token=prompts + decodes,
        sequence=len(plan.chunks) + decodes,
        pair=plan.prefill_pairs,
        chunk_context=plan.prefill_context - prompts,
        decode_context=plan.decode_context,
        step=1.0 if prompts + decodes else 0.0,
    )


def _kernels(replica: Replica, tables: str | None, stack: Stack, load: str) -> StepKernels:
    folder = installed() if tables is None else Path(tables)
    if not folder.is_dir():
        raise ConfigError(f"cost.tables={tables}: must be a folder")
    if tables and (kernels := profiled_kernels(folder, replica, stack)):
        return kernels
    return kernels_of(replica, KernelTables(folder, replica.hardware.name, stack.name), stack, load)
