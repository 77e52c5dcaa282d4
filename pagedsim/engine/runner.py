"""Carries plans out: moves blocks, runs the model, returns logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import copy_blocks
from pagedsim.core import Request, StepPlan
from pagedsim.engine.batch import flat_batch
from pagedsim.engine.cache import Cache
from pagedsim.engine.inputs import Inputs
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.mover import Mover
from pagedsim.engine.rehearsal import rehearse


class Runner:
    """One model and its cache."""

    def __init__(self, model: LoadedModel, cache: Cache, layout: str = "block") -> None:
        self.model = model
        self.cache = cache
        self.mover = Mover(cache, layout)
        device = cache.gpu.device
        self.inputs = Inputs(device) if device.type == "cuda" else None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[torch.Tensor, list[tuple[Request, int]]]:
        """Carry out a plan in the order of its fields.

        Returns logits in float32, one row a sequence that samples, and whose rows these are.
        """
        self.mover.move(plan)
        if not plan.decodes and not plan.chunks:
            return torch.empty(0, self.model.vocab_size), []
        batch = flat_batch(plan, self.cache.shape.block_size)
        if self.inputs is not None:
            batch = batch.on(self.inputs)
        logits = self.model.forward(
            batch.input_ids, batch.positions, batch.attention, self.cache.gpu, batch.logits_at
        )
        return logits, batch.samplers

    def rehearse(self, sequences: Sequence[tuple[int, int]]) -> None:
        """Compute a made-up step, as `rehearsal` explains."""
        rehearse(self.model, self.cache.gpu, self.cache.shape.block_size, sequences)

    @torch.inference_mode()
    def warm_up(self, max_tokens: int) -> None:
        """Have everything compiled that a step may need, while nobody waits for it."""
        gpu = self.cache.gpu
        room = min(max_tokens, len(gpu) * self.cache.shape.block_size)
        chunk, decode = (0, min(64, room)), (min(32, room) - 1, 1)
        for sequences in ([chunk], [decode], [decode] * 16, [decode, decode, chunk]):
            if sum(length for _, length in sequences) <= room:
                self.rehearse(sequences)
        nothing = torch.zeros(1, dtype=torch.int64, device=gpu.device)
        copy_blocks(gpu, nothing, nothing)
