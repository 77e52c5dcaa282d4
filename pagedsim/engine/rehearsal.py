"""Dummy steps, for profiling and warm-up before requests are served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from pagedsim.engine.models import LoadedModel
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.ops import on_gpu

Step = Sequence[tuple[int, int]]
"""(tokens in the cache, tokens to compute) of each sequence, decodes first."""

ENOUGH = 64
"""Tokens of the longest step where nothing is to be compiled."""
BEFORE = 31
"""Tokens that a decode has in the cache."""


def rehearsals(gpu: torch.Tensor, room: int, seqs: int) -> Iterator[Step]:
    """Steps that between them need all that a step of `room` tokens and `seqs` sequences may.

    Kernels are cut up by how many tokens they get, and the choice changes behind a power of two
    alone (`kernels/tiles.py`): so there is a step of each, in one chunk, in decodes, and in a chunk
    beside decodes.
    """
    kernels = on_gpu(gpu)
    decode = min(BEFORE, room - 1), 1
    for length in powers_of_two(2, room) if kernels else [min(room, ENOUGH)]:
        yield [(0, length)]
        if length + 2 <= room and seqs > 2:
            yield [decode, decode, (0, length)]
    for count in powers_of_two(1, min(seqs, room)) if kernels else [1]:
        yield [decode] * count


def powers_of_two(first: int, last: int) -> list[int]:
    """From one of them on, and `last` behind them; none if that is less.

    >>> powers_of_two(2, 10), powers_of_two(2, 8), powers_of_two(2, 1)
    ([2, 4, 8, 10], [2, 4, 8], [])
    """
    if last < first:
        return []
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


@torch.inference_mode()
def rehearse(
    model: LoadedModel, gpu: torch.Tensor, block_size: int, sequences: Step, width: int = 0
) -> torch.Tensor:
    """The logits of a step of some model over the pool `gpu`, of which no request has a block yet.

    All write to the same few blocks: what these hold does not matter, how many tokens run does, and
    how wide the tables are: as wide as the step needs, or `width` blocks.
    """
    device = gpu.device
    computed, lengths = (list(column) for column in zip(*sequences, strict=True))
    width = max(width, -(-max(map(sum, sequences)) // block_size))
    blocks = [block % len(gpu) for block in range(width)]
    batch = AttentionBatch.build(
        [blocks] * len(sequences), computed, lengths, block_size=block_size, device=device
    )
    # As in a step that is served, tables have rows, though here each has its own.
    rows = torch.arange(len(sequences), dtype=torch.int32, device=device)
    tables = torch.tensor(blocks, dtype=torch.int32, device=device).repeat(len(sequences), 1)
    batch = replace(batch, block_tables=tables, rows=rows)
    ids = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(at, at + n, device=device) for at, n in sequences])
    positions.clamp_(max=model.max_model_len - 1)  # one may stand for several
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    return model.forward(ids, positions, batch, gpu, ends)
