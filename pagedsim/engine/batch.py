"""What a step computes, as tensors: first on the host, then on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedsim.engine.inputs import Inputs
from pagedsim.engine.rows import Changes, Computing
from pagedsim.engine.step_inputs import Mixed
from pagedsim.engine.tables import Tables
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
    def of(
        cls,
        computing: Computing,
        mixed: Mixed,
        changes: Changes,
        tables: Tables,
        inputs: Inputs | None = None,
    ) -> Batch:
        """On the device of `tables`, which are changed as is asked.

        With `inputs` it is good as long as nothing else is placed there; without, all is on the
        host, over the same memory where types are the same.
        """
        here = [
            *map(torch.from_numpy, (computing.ids, computing.positions, mixed.sampling)),
            torch.from_numpy(computing.rows),
            torch.from_numpy(mixed.starts).int(),
            torch.from_numpy(computing.contexts).int(),
            torch.from_numpy(computing.slots),
            *map(torch.from_numpy, changes),
        ]
        there = here if inputs is None else inputs.place(here)
        ids, positions, at, rows, starts, contexts, slots, *changed = there
        tables.set(*changed)
        attention = AttentionBatch(
            tables.store, starts, contexts, slots, mixed.decodes, mixed.chunks, rows
        )
        return cls(ids, positions, attention, at)
