"""A plan as one flat batch of tokens: every decoding sequence first, then the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import AttentionBatch
from pagedsim.core import Chunk, Request, StepPlan
from pagedsim.engine.inputs import Inputs
from pagedsim.engine.rows import Computing, Rows

Samplers = list[tuple[Request, int]]
"""Each request that samples and how many rows of logits it has, in the order of the rows: one a
sequence, but a single one for a request that has not sampled yet."""


@dataclass(frozen=True)
class Batch:
    """The inputs of one forward pass, and whose its logits are."""

    input_ids: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64."""
    attention: AttentionBatch
    logits_at: torch.Tensor
    """[rows] int64: the tokens after which something is sampled."""
    samplers: Samplers

    def on(self, inputs: Inputs) -> Batch:
        """The same on the device of `inputs`, as long as nothing else is placed there."""
        host = self.attention
        ids, positions, rows, tables, starts, contexts, slots = inputs.place(
            [
                *(self.input_ids, self.positions, self.logits_at),
                *(host.block_tables, host.query_start, host.context_lens, host.slots),
            ]
        )
        attention = AttentionBatch(tables, starts, contexts, slots, host.num_decodes, host.chunks)
        return Batch(ids, positions, attention, rows, self.samplers)


def flat_batch(plan: StepPlan, rows: Rows) -> Batch:
    """The batch of a plan, on the host."""
    first = [rows.decoding(plan.decodes)] if plan.decodes else []
    rest = [_computing(chunk, rows.block_size) for chunk in plan.chunks]
    contexts = [context for part in (*first, *rest) for context in part.contexts.tolist()]
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
    parts = [*first, *rest]
    attention = AttentionBatch(
        torch.from_numpy(_stacked([part.tables for part in parts])),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
        torch.from_numpy(np.concatenate([part.slots for part in parts])),
        decodes,
        tuple(zip(lengths[single:], contexts[decodes:], strict=True)),
    )
    return Batch(
        torch.from_numpy(np.concatenate([part.ids for part in parts])),
        torch.from_numpy(np.concatenate([part.positions for part in parts])),
        attention,
        torch.tensor(sampling, dtype=torch.int64),
        samplers_of(plan),
    )


def _computing(chunk: Chunk, block_size: int) -> Computing:
    """A chunk, whose table may be longer than it needs yet."""
    positions = np.arange(chunk.start, chunk.context)
    blocks, offsets = np.divmod(positions, block_size)
    table = chunk.request.tables[chunk.sequence][: -(-chunk.context // block_size)]
    tables = np.array([table], dtype=np.int32)
    slots = tables[0, blocks].astype(np.int64) * block_size + offsets
    return Computing(
        np.array(tokens_of(chunk)), positions, slots, np.array([chunk.context]), tables
    )


def _stacked(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Tables below one another, as wide as the widest."""
    width = max(part.shape[1] for part in tables)
    stacked = np.zeros((sum(map(len, tables)), width), dtype=np.int32)
    row = 0
    for part in tables:
        stacked[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return stacked


def samplers_of(plan: StepPlan) -> Samplers:
    """Who samples in a step."""
    samplers = [(request, request.width) for request in plan.decodes]
    return samplers + [(chunk.request, 1) for chunk in plan.chunks if chunk.samples]


def _padded(tables: Sequence[Sequence[int] | NDArray[np.int32]], width: int) -> NDArray[np.int32]:
    """Tables side by side, `width` blocks of each."""
    padded = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        part = table[:width]
        row[: len(part)] = part
    return padded


def tokens_of(chunk: Chunk) -> Sequence[int]:
    """The token ids that a chunk computes."""
    request, start, end = chunk.request, chunk.start, chunk.context
    assert request.prompt is not None
    length = request.prompt_len
    ids = list(request.prompt[start : min(end, length)])
    if end > length:  # what it had generated before it lost its memory
        ids += request.outputs[chunk.sequence][max(start - length, 0) : end - length]
    return ids
