"""Carries plans out: moves blocks, runs the model, returns logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import copy_blocks
from pagedsim.core import StepPlan
from pagedsim.engine.batch import Samplers, flat_batch, samplers_of
from pagedsim.engine.cache import Cache
from pagedsim.engine.graphs import Graphs, recorder_of
from pagedsim.engine.inputs import Inputs, Places
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.mover import Mover
from pagedsim.engine.rehearsal import rehearse
from pagedsim.engine.rows import Rows


class Runner:
    """One model and its cache."""

    def __init__(
        self, model: LoadedModel, cache: Cache, *, seqs: int, longest: int, layout: str = "block"
    ) -> None:
        """For at most `seqs` sequences at a time, of at most `longest` tokens."""
        self.model = model
        self.cache = cache
        self.mover = Mover(cache, layout)
        self.graphs: Graphs | None = None
        """Made when it warms up, where there are any."""
        device, size = cache.gpu.device, cache.shape.block_size
        blocks = -(-longest // size)
        self._seqs = seqs
        self._rows = Rows(seqs, blocks, size)
        self._places = Places(device, seqs, blocks)
        self._inputs = Inputs(device) if device.type == "cuda" else None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[torch.Tensor, Samplers]:
        """Carry out a plan in the order of its fields.

        Returns logits in float32, one row a sequence that samples, and whose rows these are. They
        are good until the next step.
        """
        self.mover.move(plan)
        if plan.chunks:
            return self._mixed(plan)
        if plan.decodes:
            return self._decodes(plan)
        return torch.empty(0, self.model.vocab_size), []

    def _mixed(self, plan: StepPlan) -> tuple[torch.Tensor, Samplers]:
        batch = flat_batch(plan, self._rows)
        if self._inputs is not None:
            batch = batch.on(self._inputs)
        logits = self.model.forward(
            batch.input_ids, batch.positions, batch.attention, self.cache.gpu, batch.logits_at
        )
        return logits, batch.samplers

    def _decodes(self, plan: StepPlan) -> tuple[torch.Tensor, Samplers]:
        decoding = self._rows.decoding(plan.decodes)
        self._places.put(decoding)
        count, width = decoding.tables.shape
        if self.graphs is not None and self.graphs.holds(count):
            return self.graphs.run(count), samplers_of(plan)
        ids, positions, batch, rows = self._places.batch(count, width)
        logits = self.model.forward(ids, positions, batch, self.cache.gpu, rows)
        return logits, samplers_of(plan)

    def rehearse(self, sequences: Sequence[tuple[int, int]]) -> None:
        """Compute a made-up step, as `rehearsal` explains."""
        rehearse(self.model, self.cache.gpu, self.cache.shape.block_size, sequences)

    @torch.inference_mode()
    def warm_up(self, max_tokens: int, graphs: bool) -> None:
        """Have everything compiled that a step may need, while nobody waits for it.

        With `graphs` steps of decodes alone are captured too, if the device can do that.
        """
        gpu = self.cache.gpu
        room = min(max_tokens, len(gpu) * self.cache.shape.block_size)
        chunk, decode = (0, min(64, room)), (min(32, room) - 1, 1)
        for sequences in ([chunk], [decode], [decode] * 16, [decode, decode, chunk]):
            if sum(length for _, length in sequences) <= room:
                self.rehearse(sequences)
        nothing = torch.zeros(1, dtype=torch.int64, device=gpu.device)
        copy_blocks(gpu, nothing, nothing)
        if graphs and (recorder := recorder_of(gpu.device)) is not None:
            made = Graphs(self.model, gpu, self._places, self._seqs, recorder)
            self.graphs = made if made.capture_all() else None
