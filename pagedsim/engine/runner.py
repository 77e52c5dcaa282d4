"""Carries plans out: moves blocks, runs the model, returns logits."""

from __future__ import annotations

import torch

from pagedsim.core import Request, StepPlan
from pagedsim.engine.batch import flat_batch
from pagedsim.engine.cache import Cache
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.mover import Mover


class Runner:
    """One model and its cache."""

    def __init__(self, model: LoadedModel, cache: Cache) -> None:
        self.model = model
        self.cache = cache
        self.mover = Mover(cache)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[torch.Tensor, list[tuple[Request, int]]]:
        """Carry out a plan in the order of its fields.

        Returns logits in float32, one row a sequence that samples, and whose rows these are.
        """
        self.mover.move(plan)
        if not plan.decodes and not plan.chunks:
            return torch.empty(0, self.model.vocab_size), []
        batch = flat_batch(plan, self.cache.shape.block_size, self.cache.gpu.device)
        logits = self.model.forward(
            batch.input_ids, batch.positions, batch.attention, self.cache.gpu, batch.logits_at
        )
        return logits, batch.samplers
