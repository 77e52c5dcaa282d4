"""A plan as one flat batch of tokens: every decoding sequence first, then the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import AttentionBatch
from pagedsim.core import Chunk, Request, StepPlan
from pagedsim.engine.inputs import Inputs


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
    samplers: list[tuple[Request, int]]
    """Each request that samples and how many rows of logits it has, in the order of the rows:
    one a sequence, but a single one for a request that has not sampled yet."""

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


def flat_batch(plan: StepPlan, block_size: int) -> Batch:
    """The batch of a plan, on the host."""
    ids: list[int] = []
    positions: list[int] = []
    tables: list[list[int]] = []
    computed: list[int] = []
    samplers: list[tuple[Request, int]] = []
    for request in plan.decodes:
        last = request.num_tokens - 1
        for table, output in zip(request.tables, request.outputs, strict=True):
            ids.append(output[-1])
            positions.append(last)
            tables.append(table)
            computed.append(last)
        samplers.append((request, request.width))
    lengths = [1] * len(ids)
    rows = list(range(len(ids)))
    for chunk in plan.chunks:
        ids += tokens_of(chunk)
        positions += range(chunk.start, chunk.context)
        tables.append(chunk.request.tables[chunk.sequence])
        computed.append(chunk.start)
        lengths.append(chunk.length)
        if chunk.samples:
            rows.append(len(ids) - 1)
            samplers.append((chunk.request, 1))
    return Batch(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        AttentionBatch.build(tables, computed, lengths, block_size=block_size),
        torch.tensor(rows, dtype=torch.int64),
        samplers,
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
