"""Sequences computed by a loaded model in steps, as the engine would, from lists."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from pagedsim.engine.models import LoadedModel
from pagedsim.kernels.batch import AttentionBatch

Schedule = list[list[tuple[int, int]]]
"""The steps: (sequence, tokens) of those that are computed in each."""


def texts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[torch.Tensor]:
    """Random sequences of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator) for length in lengths]


def alone(model: Any, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """transformers' logits after every token of each sequence on its own."""
    return [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences]


def served(
    model: LoadedModel,
    sequences: list[torch.Tensor],
    schedule: Schedule,
    *,
    block_size: int = 4,
    seed: int = 0,
) -> list[torch.Tensor]:
    """The logits after every token of each sequence, computed in steps, from a shuffled cache."""
    needed = [-(-len(tokens) // block_size) for tokens in sequences]
    free = list(range(sum(needed) + 2))
    Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in needed]
    cache = model.new_cache(sum(needed) + 2, block_size).fill_(1e4)  # what is read and was not
    done = [0] * len(sequences)  # written shows
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in schedule:
        part = sorted(step, key=lambda item: item[1] != 1)  # decodes first
        batch = AttentionBatch.build(
            [tables[i] for i, _ in part],
            [done[i] for i, _ in part],
            [count for _, count in part],
            block_size=block_size,
        )
        ids = torch.cat([sequences[i][done[i] : done[i] + count] for i, count in part])
        positions = torch.cat([torch.arange(done[i], done[i] + count) for i, count in part])
        logits = model.forward(ids, positions, batch, cache, torch.arange(len(ids)))
        for (i, count), own in zip(part, logits.split([n for _, n in part]), strict=True):
            rows[i].append(own)
            done[i] += count
    assert done == [len(tokens) for tokens in sequences]
    return [torch.cat(own) for own in rows]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Fail unless logits in float32 differ by rounding alone."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def chunked(lengths: Sequence[int], most: int) -> Schedule:
    """Chunks of `most` tokens of all sequences, until none is left."""
    return [
        [(i, min(most, length - done)) for i, length in enumerate(lengths) if done < length]
        for done in range(0, max(lengths), most)
    ]


def staggered(lengths: Sequence[int]) -> Schedule:
    """Each sequence comes two steps after the one before: prefill, chunk, then decodes."""
    steps = max(2 * i + length for i, length in enumerate(lengths))
    schedule: Schedule = [[] for _ in range(steps)]
    for i, length in enumerate(lengths):
        sizes = [min(6, length)]
        sizes += [min(3, length - sum(sizes))] if length > sum(sizes) else []
        sizes += [1] * (length - sum(sizes))
        for j, size in enumerate(sizes):
            schedule[2 * i + j].append((i, size))
    return [step for step in schedule if step]
