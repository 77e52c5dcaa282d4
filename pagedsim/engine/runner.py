"""Executes plans: moves blocks, runs the model, returns logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from pagedsim.core import ConfigError, StepPlan
from pagedsim.engine.cache import Cache, Mover
from pagedsim.engine.graphs import Graphs, recorder_of
from pagedsim.engine.host_copies import HostCopies
from pagedsim.engine.inputs import Batch, DecodeInputs, PackedCopies, Shape, feed
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.parallel.ranks import Ranks
from pagedsim.engine.profile import dummy_step, warm_up_steps
from pagedsim.engine.runtime import uninterrupted
from pagedsim.engine.step_inputs import (
    BatchColumns,
    MixedLayout,
    StepInputs,
    TableChanges,
    TableRows,
    store_rows,
)
from pagedsim.kernels.ops import copy_blocks


class _Launch(NamedTuple):
    """A step whose inputs were sent."""

    batch: Batch
    key: int | Shape | None
    """Of the graph that computes it, if there is one."""
    rows: int
    """Of logits."""


class Runner:
    """One model and its cache."""

    def __init__(
        self, model: LoadedModel, cache: Cache, *, seqs: int, longest: int, layout: str = "block"
    ) -> None:
        """For at most `seqs` sequences at a time, of at most `longest` tokens."""
        self.model = model
        self.cache = cache
        self.mover = Mover(cache, layout)
        self.copies = HostCopies(cache, layout)
        self.graphs: Graphs | None = None
        """Captured by `warm_up`, if at all."""
        self.launched = Counter({"graph": 0, "eager": 0})
        """Steps that were launched as one graph, and kernel by kernel."""
        device, size = cache.gpu.device, cache.shape.block_size
        blocks = -(-longest // size)
        self._seqs = seqs
        self._rows = TableRows(store_rows(seqs), blocks, size)
        self._places = DecodeInputs(device, seqs, blocks)
        self._inputs = PackedCopies(device) if device.type != "cpu" else None

    def inputs_of(self, plan: StepPlan, before: StepPlan | None = None) -> StepInputs:
        """The inputs of a plan. Each plan must come once, and be executed in the same order.

        `before` is the plan before it, while its tokens are in flight.
        """
        return StepInputs.build(plan, self._rows, before, self.copies.reported())

    @torch.inference_mode()
    def carry_out(self, inputs: StepInputs, picked: torch.Tensor | None = None) -> torch.Tensor:
        """Execute a step; returns logits in float32, one row per sampling sequence.

        They are valid until the next step. `picked` are the sampled tokens of the step before, on
        the device, while they are in flight.
        """
        # Inputs first: a copy behind swap-ins would wait for them.
        launch = None
        if (computing := inputs.computing) is not None:
            if inputs.mixed is None:
                launch = self._decoding(computing, inputs.changes, picked)
            else:
                launch = self._mixed(computing, inputs.mixed, inputs.changes, picked)
        self.mover.move(inputs, partial(inputs.written, self.cache.shape.block_size))
        if inputs.host is None:
            return self._computed(launch)
        self.copies.before(inputs.host)
        logits = self._computed(launch)
        self.copies.after(inputs.host)
        return logits

    def _decoding(
        self, computing: BatchColumns, changes: TableChanges, picked: torch.Tensor | None
    ) -> _Launch:
        """Send the inputs of a step of decodes alone."""
        count = len(computing.ids)
        self._places.put(computing, changes, picked)
        key = None if self.graphs is None else self.graphs.size_of(count)
        return _Launch(self._places.batch(count, computing), key, count)

    def _mixed(
        self,
        computing: BatchColumns,
        mixed: MixedLayout,
        changes: TableChanges,
        picked: torch.Tensor | None,
    ) -> _Launch:
        """Send the inputs of a step with chunks."""
        rows, graphs = len(mixed.sampling), self.graphs
        if graphs is not None:
            shape = graphs.shape_of(len(computing.ids), len(computing.contexts))
            if shape is not None:
                graphs.prompts.put(shape, computing, mixed, changes, picked)
                return _Launch(graphs.prompts.batch(shape), shape, rows)
        batch = Batch.of(computing, mixed, changes, self._places.tables, self._inputs)
        feed(batch.input_ids, computing.ids, picked)
        return _Launch(batch, None, rows)

    def _computed(self, launch: _Launch | None) -> torch.Tensor:
        """The logits of a step."""
        if launch is None:
            return torch.empty(0, self.model.vocab_size)
        (ids, positions, attention, wanted), key, rows = launch
        if (group := self.model.group) is not None:  # rank 0 alone has the tokens
            group.broadcast(ids)
        self.launched["eager" if key is None else "graph"] += 1
        if self.graphs is not None and key is not None:
            return self.graphs.run(key, rows)
        return self.model.forward(ids, positions, attention, self.cache.gpu, wanted)

    def forget(self) -> None:
        """Reset after a plan whose inputs were made was not executed to its end."""
        self._rows.forget()

    def check(self) -> None:
        """Raise RankError if another rank is gone, so that the result is undefined."""

    def close(self) -> None:
        """Free the memory of other ranks, if any."""

    @torch.inference_mode()
    def dummy_step(self, sequences: Sequence[tuple[int, int]]) -> None:
        """Compute a dummy step (profile.py), or the graph that a real one would have."""
        if self.graphs is not None:
            shape = self.graphs.shape_of(sum(n for _, n in sequences), len(sequences))
            if shape is not None:
                self.graphs.prompts.clear(shape)
                self.graphs.run(shape, 0)
                return
        dummy_step(self.model, self.cache.gpu, self.cache.shape.block_size, sequences)

    @torch.inference_mode()
    def warm_up(self, max_tokens: int, graphs: int) -> None:
        """Compile all kernels that a step may need, before requests arrive.

        Steps of up to `graphs` tokens are captured too, if the device can do that.
        """
        gpu = self.cache.gpu
        room = min(max_tokens, len(gpu) * self.cache.shape.block_size)
        for step in warm_up_steps(gpu, room, self._seqs):
            dummy_step(self.model, gpu, self.cache.shape.block_size, step)
        nothing = torch.zeros(1, dtype=torch.int64, device=gpu.device)
        copy_blocks(gpu, nothing, nothing)
        if graphs and (recorder := recorder_of(gpu.device)) is not None:
            most = min(max_tokens, graphs)
            captured = Graphs(self.model, gpu, self._places, self._seqs, most, recorder)
            self.graphs = captured if captured.capture_all() else None
            if self.graphs is None and self.model.group is not None:
                # Other ranks may have graphs, which compute padding, too.
                raise ConfigError("no CUDA graphs can be made; give enforce_eager=True")


class Leader(Runner):
    """The runner of rank 0: every command is also executed by the other ranks."""

    def __init__(self, ranks: Ranks, model: LoadedModel, cache: Cache, **settings: Any) -> None:
        """`settings` are those of `Runner`."""
        self._ranks = ranks
        with ranks.together("make", cache.shape, len(cache.gpu), len(cache.cpu), **settings):
            super().__init__(model, cache, **settings)
        ranks.replies()

    def carry_out(self, inputs: StepInputs, picked: torch.Tensor | None = None) -> torch.Tensor:
        with uninterrupted(), self._ranks.together("carry_out", _without_tokens(inputs)):
            return super().carry_out(inputs, picked)

    def dummy_step(self, sequences: Sequence[tuple[int, int]]) -> None:
        with self._ranks.together("dummy_step", sequences):
            super().dummy_step(sequences)

    def warm_up(self, max_tokens: int, graphs: int) -> None:
        with self._ranks.together("warm_up", max_tokens, graphs):
            super().warm_up(max_tokens, graphs)
        self._ranks.replies()

    def check(self) -> None:
        self._ranks.check()

    def close(self) -> None:
        if not self._ranks.gone:
            with self._ranks.together("drop"):
                pass
            self._ranks.replies()


def _without_tokens(inputs: StepInputs) -> StepInputs:
    """The inputs without token ids, which rank 0 broadcasts on the device."""
    if (computing := inputs.computing) is None:
        return inputs
    return replace(inputs, computing=computing._replace(ids=np.zeros(0, dtype=np.int64)))
