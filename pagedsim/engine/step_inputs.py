"""What a plan has done: moves, and one flat batch of tokens, decodes first and then the chunks.

Numbers alone, in lists and NumPy's arrays: no request is in it and nothing of a device, so it can
be carried out elsewhere than where it was planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pagedsim.core import Chunk, Request, StepPlan
from pagedsim.core.memory import Copies, Pairs
from pagedsim.engine.rows import Changes, Column, Computing, Rows

Samplers = list[tuple[Request, int]]
"""Each request that samples and how many rows of logits it has, in the order of the rows: one a
sequence, but a single one for a request that has not sampled yet."""


class Mixed(NamedTuple):
    """What a batch with chunks in it has beyond its columns."""

    starts: Column
    """[sequences + 1]: where each sequence's tokens begin, and the end of the last."""
    sampling: Column
    """The tokens after which something is sampled."""
    decodes: int
    """Sequences at the front that compute one token each."""
    chunks: tuple[tuple[int, int], ...]
    """(tokens, context) of each of the others."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that one step does, moves first; they are as a plan has them."""

    swap_out: Pairs
    copies: Copies
    swap_in: Pairs
    computing: Computing | None
    """Nothing may be computed at all."""
    mixed: Mixed | None
    """None: decodes alone, which all sample."""
    changes: Changes
    """Of the store of block tables."""

    def written(self, block_size: int) -> set[int]:
        """The blocks that what is computed is written to."""
        if self.computing is None:
            return set()
        return set(np.unique(self.computing.slots // block_size).tolist())


def inputs_of(plan: StepPlan, rows: Rows, before: StepPlan | None = None) -> StepInputs:
    """What a plan has done, with the block tables as they are now.

    `before`: the step before it, if its tokens were not told yet.
    """
    rows.begin(plan)
    computing, mixed = None, None
    if plan.chunks:
        computing, mixed = flat(plan, rows, before)
    elif plan.decodes:
        computing = rows.decoding(plan, _last_tokens(plan, before))
    moves = plan.swap_out, plan.copies, plan.swap_in
    return StepInputs(*moves, computing, mixed, rows.changes())


def samplers_of(plan: StepPlan) -> Samplers:
    """The requests that sample in a step."""
    samplers = [(request, request.width) for request in plan.decodes]
    return samplers + [(chunk.request, 1) for chunk in plan.chunks if chunk.samples]


def places_of(plan: StepPlan) -> dict[Request, int]:
    """At which place a step picks whose token, where each samples one sequence."""
    return {request: place for place, (request, _) in enumerate(samplers_of(plan))}


def flat(plan: StepPlan, rows: Rows, before: StepPlan | None = None) -> tuple[Computing, Mixed]:
    """Decodes and chunks in one."""
    first = [rows.decoding(plan, _last_tokens(plan, before))] if plan.decodes else []
    rest = [rows.chunk(chunk, np.array(tokens_of(chunk))) for chunk in plan.chunks]
    computing = Computing(*map(np.concatenate, zip(*first, *rest, strict=True)))
    contexts = computing.contexts
    decodes = len(contexts) - len(rest)
    starts = [*range(decodes), *accumulate((len(part.ids) for part in rest), initial=decodes)]
    sampling = starts[:decodes]
    for end, chunk in zip(starts[decodes + 1 :], plan.chunks, strict=True):
        if chunk.samples:
            sampling.append(end - 1)
    # Chunks of one token that come first go with the decodes, which have a kernel of their own.
    lengths = [chunk.length for chunk in plan.chunks]
    single = next((i for i, length in enumerate(lengths) if length != 1), len(lengths))
    decodes += single
    chunks = tuple(zip(lengths[single:], contexts[decodes:].tolist(), strict=True))
    return computing, Mixed(np.array(starts), np.array(sampling, dtype=np.int64), decodes, chunks)


def _last_tokens(plan: StepPlan, before: StepPlan | None) -> Column:
    """The last token of each sequence that decodes; ~i where the step before picks it, at i."""
    if before is None:
        if plan.decode_count == len(plan.decodes):
            return np.array([request.outputs[0][-1] for request in plan.decodes])
        return np.array([output[-1] for request in plan.decodes for output in request.outputs])
    if before.decodes is plan.decodes:  # one sequence each, in the same order
        return ~np.arange(len(plan.decodes))
    picked = places_of(before)
    return np.array(
        [
            ~picked[request] if request in picked else request.outputs[0][-1]
            for request in plan.decodes
        ]
    )


def tokens_of(chunk: Chunk) -> Sequence[int]:
    """The token ids that a chunk computes."""
    request, start, end = chunk.request, chunk.start, chunk.context
    assert request.prompt is not None
    length = request.prompt_len
    ids = list(request.prompt[start : min(end, length)])
    if end > length:  # what it had generated before it lost its memory
        ids += request.outputs[chunk.sequence][max(start - length, 0) : end - length]
    return ids
