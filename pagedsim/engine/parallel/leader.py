"""The runner of rank 0: whatever it does, the others do too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from pagedsim.engine.cache import Cache
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.parallel.ranks import Ranks
from pagedsim.engine.process import uninterrupted
from pagedsim.engine.runner import Runner
from pagedsim.engine.step_inputs import StepInputs


class Leader(Runner):
    """The other ranks make a cache and a runner like its own, in place of any they had."""

    def __init__(
        self,
        ranks: Ranks,
        model: LoadedModel,
        cache: Cache,
        *,
        seqs: int,
        longest: int,
        layout: str = "block",
    ) -> None:
        self._ranks = ranks
        settings = {"seqs": seqs, "longest": longest, "layout": layout}
        with ranks.together("make", cache.shape, len(cache.gpu), len(cache.cpu), **settings):
            super().__init__(model, cache, seqs=seqs, longest=longest, layout=layout)
        ranks.replies()

    def carry_out(self, inputs: StepInputs, picked: torch.Tensor | None = None) -> torch.Tensor:
        with uninterrupted(), self._ranks.together("carry_out", _without_tokens(inputs)):
            return super().carry_out(inputs, picked)

    def rehearse(self, sequences: Sequence[tuple[int, int]]) -> None:
        with self._ranks.together("rehearse", sequences):
            super().rehearse(sequences)

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
    """The same for ranks that get the tokens from this one on the device."""
    if (computing := inputs.computing) is None:
        return inputs
    return replace(inputs, computing=computing._replace(ids=np.zeros(0, dtype=np.int64)))
