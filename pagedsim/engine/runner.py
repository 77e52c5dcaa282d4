"""Executes plans: moves blocks, runs the model, returns logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from pagedsim.core import ConfigError, StepPlan
from pagedsim.engine.cache import Cache, Mover
from pagedsim.engine.graphs import Graphs, recorder_of
from pagedsim.engine.inputs import Batch, Inputs, Places, feed
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.profile import rehearsals, rehearse
from pagedsim.engine.step_inputs import Rows, StepInputs, inputs_of, rows_for
from pagedsim.kernels.ops import copy_blocks


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
        self._rows = Rows(rows_for(seqs), blocks, size)
        self._places = Places(device, seqs, blocks)
        self._inputs = Inputs(device) if device.type == "cuda" else None

    def inputs_of(self, plan: StepPlan, before: StepPlan | None = None) -> StepInputs:
        """What a plan has done, as numbers; each plan is asked about once, in their order, and what
        is said of it carried out in the same order.

        `before`: the plan before it, if its tokens were not told yet.
        """
        return inputs_of(plan, self._rows, before)

    @torch.inference_mode()
    def carry_out(self, inputs: StepInputs, picked: torch.Tensor | None = None) -> torch.Tensor:
        """Do it, and return logits in float32, one row a sequence that samples.

        They are good until the next step. `picked`: the tokens of the step before, on the device,
        where they were not told yet.
        """
        # Inputs first: behind blocks that come in, the next step's would wait for them.
        batch = None
        if (computing := inputs.computing) is not None:
            if inputs.mixed is None:
                self._places.put(computing, inputs.changes, picked)
            else:
                batch = Batch.of(
                    computing, inputs.mixed, inputs.changes, self._places.tables, self._inputs
                )
                feed(batch.input_ids, computing.ids, picked)
        self.mover.move(inputs, partial(inputs.written, self.cache.shape.block_size))
        if batch is not None:
            return self._mixed(batch)
        if computing is not None:
            return self._decodes(len(computing.ids))
        return torch.empty(0, self.model.vocab_size)

    def _mixed(self, batch: Batch) -> torch.Tensor:
        if (group := self.model.group) is not None:  # rank 0 alone knows the tokens
            group.hand_out(batch.input_ids)
        return self.model.forward(
            batch.input_ids, batch.positions, batch.attention, self.cache.gpu, batch.logits_at
        )

    def _decodes(self, count: int) -> torch.Tensor:
        ids, positions, batch, rows = self._places.batch(count)
        if (group := self.model.group) is not None:
            group.hand_out(ids)
        if self.graphs is not None and self.graphs.holds(count):
            return self.graphs.run(count)
        return self.model.forward(ids, positions, batch, self.cache.gpu, rows)

    def forget(self) -> None:
        """A step that `inputs_of` was asked about was not carried out, or not to its end."""
        self._rows.forget()

    def check(self) -> None:
        """Raise RankError where other ranks are needed and gone: what was computed is nothing."""

    def close(self) -> None:
        """Give back what other ranks hold, if there are any."""

    def rehearse(self, sequences: Sequence[tuple[int, int]]) -> None:
        """Compute a made-up step, as `rehearsal` explains."""
        rehearse(self.model, self.cache.gpu, self.cache.shape.block_size, sequences)

    @torch.inference_mode()
    def warm_up(self, max_tokens: int, graphs: bool) -> None:
        """Compile all kernels that a step may need, before requests arrive.

        With `graphs` steps of decodes alone are captured too, if the device can do that.
        """
        gpu = self.cache.gpu
        room = min(max_tokens, len(gpu) * self.cache.shape.block_size)
        for step in rehearsals(gpu, room, self._seqs):
            rehearse(self.model, gpu, self.cache.shape.block_size, step)
        nothing = torch.zeros(1, dtype=torch.int64, device=gpu.device)
        copy_blocks(gpu, nothing, nothing)
        if graphs and (recorder := recorder_of(gpu.device)) is not None:
            made = Graphs(self.model, gpu, self._places, self._seqs, recorder)
            self.graphs = made if made.capture_all() else None
            if self.graphs is None and self.model.group is not None:
                # The others may have theirs, which compute padding, too.
                raise ConfigError("no CUDA graphs can be made; give enforce_eager=True")
