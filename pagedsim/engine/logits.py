"""What changes logits before a token is drawn: penalties, and what is forbidden.

Every function takes [rows, vocab] in float32 and returns a new tensor. No row's result depends on
the other rows, and nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedsim.core import SamplingParams
from pagedsim.engine.fetch import sent
from pagedsim.engine.said import Said, Tokens, places


def penalties(params: Sequence[SamplingParams], device: torch.device) -> Tensor:
    """[3, rows, 1]: each row's penalties for repetition, presence and frequency."""
    settings = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
    return sent(torch.tensor(settings).view(-1, 3), device).T[:, :, None]


def penalise(
    logits: Tensor,
    settings: Tensor,
    prompts: Sequence[Tokens],
    outputs: Sequence[Tokens],
    said: Said | None = None,
) -> Tensor:
    """Penalties for what was said already; `settings` are those of `penalties`.

    Repetition looks at prompt and output and scales (as in transformers); presence and frequency
    look at the output alone and subtract (as in vLLM and OpenAI's API). `said` has counted what
    was said before.
    """
    repetition, presence, frequency = settings
    counts, seen = (said or Said()).counts(prompts, outputs, logits)
    spoken = counts > 0
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen | spoken, scaled, logits)
    return logits - frequency * counts - presence * spoken


def forbid(logits: Tensor, tokens: Sequence[Tokens]) -> Tensor:
    """Rule out each row's own `tokens`."""
    logits = logits.clone(memory_format=torch.contiguous_format)
    logits.view(-1).index_fill_(0, places(tokens, logits), -torch.inf)
    return logits
