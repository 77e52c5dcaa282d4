"""Rank 0's runner, whose commands the other ranks execute, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pagedsim.engine.cache import Cache
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.parallel.ranks import Ranks
from pagedsim.engine.runner import Runner
from pagedsim.engine.runtime import uninterrupted
from pagedsim.engine.step_inputs import StepInputs


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

    def warm_up(self, max_tokens: int, graphs: bool) -> None:
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
