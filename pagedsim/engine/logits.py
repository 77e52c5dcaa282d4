"""What changes logits before a token is drawn: penalties, and what is forbidden.

Every function takes [rows, vocab] in float32 and returns a new tensor. What is ruled out becomes
-inf. No row's result depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from pagedsim.core import SamplingParams
from pagedsim.engine.fetch import sent

Tokens = Sequence[int]


def penalise(
    logits: Tensor,
    params: Sequence[SamplingParams],
    prompts: Sequence[Tokens],
    outputs: Sequence[Tokens],
) -> Tensor:
    """Penalties for what was said already.

    Repetition looks at prompt and output and scales (as in transformers); presence and frequency
    look at the output alone and subtract (as in vLLM and OpenAI's API).
    """
    settings = torch.tensor(
        [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params],
        device=logits.device,
    )
    repetition, presence, frequency = settings[:, :, None].unbind(1)
    said = _counts(outputs, logits)
    if any(p.repetition_penalty != 1 for p in params):
        seen = (said > 0) | (_counts(prompts, logits) > 0)
        scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
        logits = torch.where(seen, scaled, logits)
    return logits - frequency * said - presence * (said > 0)


def _counts(texts: Sequence[Tokens], like: Tensor) -> Tensor:
    """How often each row's text has each token."""
    rows, vocab = like.shape
    sizes = [len(text) for text in texts]
    flat = np.fromiter(chain.from_iterable(texts), np.int64, sum(sizes))
    flat += np.repeat(np.arange(rows) * vocab, sizes)
    counts = torch.bincount(torch.from_numpy(flat).to(like.device), minlength=rows * vocab)
    return counts.view(rows, vocab)


def forbid(logits: Tensor, tokens: Sequence[Tokens]) -> Tensor:
    """Rule out each row's own `tokens`."""
    sizes = torch.tensor([len(one) for one in tokens])
    rows = torch.repeat_interleave(torch.arange(len(tokens)), sizes)
    flat = torch.tensor(list(chain.from_iterable(tokens)), dtype=torch.int64)
    logits = logits.clone()
    logits[sent(rows, logits.device), sent(flat, logits.device)] = -torch.inf
    return logits
