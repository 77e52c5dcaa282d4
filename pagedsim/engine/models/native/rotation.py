"""Cosines and sines of all positions, worked out once by the module's own rotary embedding."""

from __future__ import annotations

from typing import Any

import torch


class Rotation:
    """A row a position: of a step's tokens they are read at once."""

    def __init__(self, rotary: Any, like: torch.Tensor, length: int) -> None:
        """`rotary` is that of a model for sequences of up to `length` tokens, of whatever kind;
        its numbers come in the dtype of `like` and on its device.

        transformers negates the second half of a head as it swaps the two; here `sin` is negated.
        """
        # A step that was launched before an end was known goes one token further.
        positions = torch.arange(length + 1, device=like.device)
        cos, sin = rotary(like, positions.unsqueeze(0))
        first, second = sin[0].chunk(2, -1)
        self._rows = torch.cat((cos[0], -first, second), -1)

    def of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `ops.rotate` takes for tokens at these positions."""
        cos, sin = self._rows.index_select(0, positions).chunk(2, -1)
        return cos, sin
