"""What a step computes, as tensors: first on the host, then on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedsim.engine.inputs import Inputs
from pagedsim.engine.rows import Computing
from pagedsim.engine.step_inputs import Mixed
from pagedsim.kernels.batch import AttentionBatch


@dataclass(frozen=True)
class Batch:
    """The inputs of one forward pass."""

    input_ids: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64."""
    attention: AttentionBatch
    logits_at: torch.Tensor
    """[rows] int64: the tokens after which something is sampled."""

    @classmethod
    def of(cls, computing: Computing, mixed: Mixed) -> Batch:
        """On the host, over the same memory where the types are the same."""
        attention = AttentionBatch(
            torch.from_numpy(computing.tables),
            torch.from_numpy(mixed.starts).int(),
            torch.from_numpy(computing.contexts).int(),
            torch.from_numpy(computing.slots),
            mixed.decodes,
            mixed.chunks,
        )
        return cls(
            torch.from_numpy(computing.ids),
            torch.from_numpy(computing.positions),
            attention,
            torch.from_numpy(mixed.sampling),
        )

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
        return Batch(ids, positions, attention, rows)
