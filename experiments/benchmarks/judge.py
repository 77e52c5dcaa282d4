"""What a model's logits should be: those of transformers, in a precision that rounds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedsim.engine.models import LoadedModel
from pagedsim.engine.models.probe import attention
from pagedsim.engine.sampler import Row, Sampler
from pagedsim.kernels.float8 import AUTO, FORMATS, rounded

FACTOR = 2.0
"""How much farther off than transformers in the same precision one may be."""


class Verdict(NamedTuple):
    """|logits - true ones| / |true ones|, and how much of it is rounding."""

    error: float
    allowed: float

    @property
    def right(self) -> bool:
        """Not so for NaN."""
        return self.error <= self.allowed


class Judge:
    """Holds logits against transformers' own, without blocks, in float32.

    What transformers is off by in the model's own precision is what rounding explains. With a cache
    of 8 bits both see keys and values rounded so.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Made before the model serves anybody: its weights are copied."""
        self._own: Any = model.module
        self._exact = deepcopy(self._own).float()
        self._known: dict[tuple[str, tuple[int, ...]], tuple[Tensor, float]] = {}

    def verdict(self, tokens: Sequence[int], cache: str, logits: Tensor) -> Verdict:
        """On the logits after some tokens."""
        key = (cache, tuple(tokens))
        if key not in self._known:
            exact = _after(self._exact, tokens, cache)
            self._known[key] = exact, _off(_after(self._own, tokens, cache), exact)
        exact, usual = self._known[key]
        return Verdict(_off(logits, exact), FACTOR * usual + 1e-5)


def same_draws(logits: Tensor, rows: Sequence[Row]) -> bool:
    """Whether the tokens that are drawn of logits are those that a CPU draws of them."""
    here, there = (Sampler().sample(one, rows) for one in (logits, logits.cpu()))
    return [one.token for one in here] == [one.token for one in there]


def _off(logits: Tensor, exact: Tensor) -> float:
    return float((logits.float() - exact).norm() / exact.norm())


@torch.no_grad()
def _after(module: Any, tokens: Sequence[int], cache: str) -> Tensor:
    """The logits of the next token."""
    ids = torch.tensor([list(tokens)], device=module.device)
    with attention(module, _registered(cache)):
        output = module(input_ids=ids, use_cache=False, logits_to_keep=1, return_dict=True)
    last: Tensor = output.logits[0, -1]
    return last.float()


def _registered(cache: str) -> str:
    """The name of the attention that sees keys and values as a cache holds them."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    if cache == AUTO:
        return "sdpa"

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        k, v = (rounded(one, FORMATS[cache]).to(q.dtype) for one in (k, v))
        return sdpa_attention_forward(module, q, k, v, *rest, **named)

    AttentionInterface.register(cache, attend)
    AttentionMaskInterface.register(cache, sdpa_mask)
    return cache
