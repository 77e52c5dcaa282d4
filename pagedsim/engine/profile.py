"""Start-up: dummy steps, and the number of KV blocks that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from pagedsim.core import ConfigError
from pagedsim.engine.cache import CacheShape
from pagedsim.engine.graphs import Graphs, Unrecordable, recorder_of
from pagedsim.engine.inputs import DecodeInputs
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.runtime import GIB
from pagedsim.engine.sampler import Sampler, sample_alike
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.ops import on_gpu

Step = Sequence[tuple[int, int]]
"""(tokens in the cache, tokens to compute) of each sequence, decodes first."""

UNCOMPILED_TOKENS = 64
"""Tokens of the longest dummy step where no kernel is compiled."""
DECODE_CONTEXT = 31
"""Tokens in the cache of a dummy decode."""
LONG_CONTEXT = 2048
"""Those of a dummy chunk whose context is cut into parts."""


def warm_up_steps(gpu: torch.Tensor, room: int, seqs: int) -> Iterator[Step]:
    """Dummy steps that use all kernels of any step of at most `room` tokens and `seqs` sequences.

    Tiles depend on the number of tokens and change behind powers of two alone
    (`kernels/tiles.py`): so there is a step of each power, in one chunk, in decodes, and in a chunk
    beside decodes.
    """
    kernels = on_gpu(gpu)
    decode = min(DECODE_CONTEXT, room - 1), 1
    for length in powers_of_two(2, room) if kernels else [min(room, UNCOMPILED_TOKENS)]:
        yield [(0, length)]
        if kernels and length < room:
            yield [(LONG_CONTEXT, length)]
        if length + 2 <= room and seqs > 2:
            yield [decode, decode, (0, length)]
    for count in powers_of_two(1, min(seqs, room)) if kernels else [1]:
        yield [decode] * count


def powers_of_two(first: int, last: int) -> list[int]:
    """Powers of two from `first` on, and `last`; none if that is less.

    >>> powers_of_two(2, 10), powers_of_two(2, 8), powers_of_two(2, 1)
    ([2, 4, 8, 10], [2, 4, 8], [])
    """
    if last < first:
        return []
    powers = []
    while first < last:
        powers.append(first)
        first *= 2
    return [*powers, last]


@torch.inference_mode()
def dummy_step(
    model: LoadedModel, gpu: torch.Tensor, block_size: int, sequences: Step, width: int = 0
) -> torch.Tensor:
    """The logits of a dummy step over the pool `gpu`, before any request has a block.

    All sequences write to the same few blocks, since only the number of tokens matters and the
    width of the tables: that of the step, or `width` blocks.
    """
    device = gpu.device
    computed, lengths = (list(column) for column in zip(*sequences, strict=True))
    width = max(width, -(-max(map(sum, sequences)) // block_size))
    blocks = [block % len(gpu) for block in range(width)]
    batch = AttentionBatch.build(
        [blocks] * len(sequences), computed, lengths, block_size=block_size, device=device
    )
    # As in a real step tables have rows, here one per sequence.
    rows = torch.arange(len(sequences), dtype=torch.int32, device=device)
    tables = torch.tensor(blocks, dtype=torch.int32, device=device).repeat(len(sequences), 1)
    batch = replace(batch, block_tables=tables, rows=rows)
    ids = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(at, at + n, device=device) for at, n in sequences])
    positions.clamp_(max=model.max_model_len - 1)  # beyond the last position one stands for several
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    return model.forward(ids, positions, batch, gpu, ends)


HOST_POOL = 1 * GIB
"""Bytes of the largest default cache without a GPU, over all ranks."""


def fitting_blocks(
    model: LoadedModel,
    shape: CacheShape,
    *,
    max_model_len: int,
    max_seqs: int,
    max_batched_tokens: int,
    utilization: float,
    graphs: int,
) -> int:
    """The blocks that fit beside the weights, the activations of the largest step and the CUDA
    graphs of steps of up to `graphs` tokens."""
    needed = -(-max_model_len // shape.block_size)
    useful = max_seqs * needed
    if model.device.type != "cuda":
        return max(min(useful, HOST_POOL // model.ranks_count // shape.block_bytes), needed)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    free, total = torch.cuda.mem_get_info(model.device)
    others = total - free - torch.cuda.memory_reserved(model.device)
    worst_step(model, shape, max_seqs, max_batched_tokens, needed)
    peak = torch.cuda.max_memory_allocated(model.device) + others
    torch.cuda.empty_cache()
    places = DecodeInputs(model.device, max_seqs, needed)
    peak += places.nbytes
    if graphs and (recorder := recorder_of(model.device)) is not None:
        most = min(max_batched_tokens, graphs)
        blank = Graphs(model, shape.blank(1, model.device), places, max_seqs, most, recorder)
        peak += graph_bytes(blank, partial(_free, model.device))
        torch.cuda.empty_cache()
    blocks = int((total * utilization - peak) // shape.block_bytes)
    if blocks < needed:
        raise ConfigError(
            f"gpu_memory_utilization={utilization}: {total * utilization / GIB:.1f} GiB, of which "
            f"weights, activations and others take {peak / GIB:.1f}, leave {max(blocks, 0)} blocks "
            f"of {shape.block_bytes / 2**20:.2f} MiB: one request of max_model_len={max_model_len} "
            f"needs {needed}; raise gpu_memory_utilization, or lower max_model_len or "
            f"max_batched_tokens={max_batched_tokens}"
        )
    return min(blocks, useful)


def worst_step(model: LoadedModel, shape: CacheShape, seqs: int, tokens: int, blocks: int) -> None:
    """Compute the most tokens of a step, in the most sequences that sample.

    All but one decode: the partial results of their contexts take the memory that tables of
    `blocks` blocks need. Each sequence uses all sampling settings, penalties included, which take
    several times the memory of the logits. Computed twice, since the penalties' token counts are
    kept while the next step is computed.
    """
    seqs = min(seqs, tokens)
    lengths = [1] * (seqs - 1) + [tokens - seqs + 1]
    cache = shape.blank(1, model.device)
    steps = [(0, length) for length in lengths]
    sampler = Sampler()
    for _ in range(2):
        sample_alike(dummy_step(model, cache, shape.block_size, steps, blocks), sampler)


def graph_bytes(graphs: Graphs, free: Callable[[], int]) -> int:
    """Bytes of all graphs, over a cache of one block.

    The two largest are captured; each other takes no more than the second, since they share memory
    with the largest. `free` returns the bytes that are left.
    """
    left = [free()]
    try:
        for key in graphs.keys[:2]:
            graphs.capture(key)
            left.append(free())
    except Unrecordable:  # as on all ranks; logged when all are captured
        return 0
    first, *others = (max(before - after, 0) for before, after in pairwise(left))
    more = sum(others) * (len(graphs.keys) - 1)
    return graphs.nbytes + first + more


def _free(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
