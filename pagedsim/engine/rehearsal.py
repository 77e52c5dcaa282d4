"""Made-up steps, for what must be measured or compiled before anybody is served."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedsim.engine.models import LoadedModel
from pagedsim.kernels.batch import AttentionBatch


@torch.inference_mode()
def rehearse(
    model: LoadedModel, gpu: torch.Tensor, block_size: int, sequences: Sequence[tuple[int, int]]
) -> None:
    """Compute a step of some model over the pool `gpu`, in which nobody has a block yet.

    `sequences` are (tokens in the cache, tokens to compute), decodes first. All write to the same
    few blocks: what these hold does not matter, how many tokens run does.
    """
    device = gpu.device
    computed, lengths = (list(column) for column in zip(*sequences, strict=True))
    blocks = list(range(-(-max(map(sum, sequences)) // block_size)))
    batch = AttentionBatch.build(
        [blocks] * len(sequences), computed, lengths, block_size=block_size, device=device
    )
    ids = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(at, at + n, device=device) for at, n in sequences])
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    logits = model.forward(ids, positions, batch, gpu, ends)
    torch.softmax(logits, dim=-1).argmax(dim=-1).tolist()  # a sampler's temporaries
