"""Memory profiling: the number of KV blocks that fit beside the peak of a worst-case step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from pagedsim.core import ConfigError
from pagedsim.engine.cache import CacheShape
from pagedsim.engine.graphs import Graphs, Recorder, Unrecordable, recorder_of
from pagedsim.engine.inputs import Places
from pagedsim.engine.memory_check import GIB
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.rehearsal import rehearse
from pagedsim.engine.sampler import Sampler, sample_with_everything

HOST_POOL = 1 * GIB
"""The most that the cache takes by default where there is no GPU, over all ranks."""


def fitting_blocks(
    model: LoadedModel,
    shape: CacheShape,
    *,
    max_model_len: int,
    max_seqs: int,
    max_batched_tokens: int,
    utilization: float,
    graphs: bool,
) -> int:
    """The blocks of a cache beside the weights, the activations of the largest step and, if there
    are to be any, the CUDA graphs."""
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
    places = Places(model.device, max_seqs, needed)
    peak += places.nbytes
    if graphs and (recorder := recorder_of(model.device)) is not None:
        peak += graph_bytes(model, shape, places, max_seqs, recorder, partial(_free, model.device))
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
    """Compute as many tokens as a step may, in as many sequences as may sample.

    All but one decode: what their contexts' parts leave behind has as much room as tables of
    `blocks` blocks ask for. Each sequence asks for all that sampling knows, penalties included,
    which take several times what the logits do. It is computed twice, since the counts that
    penalties go by are kept while the next step is computed.
    """
    seqs = min(seqs, tokens)
    lengths = [1] * (seqs - 1) + [tokens - seqs + 1]
    cache = shape.blank(1, model.device)
    steps = [(0, length) for length in lengths]
    sampler = Sampler()
    for _ in range(2):
        sample_with_everything(rehearse(model, cache, shape.block_size, steps, blocks), sampler)


def graph_bytes(
    model: LoadedModel,
    shape: CacheShape,
    places: Places,
    seqs: int,
    recorder: Recorder,
    free: Callable[[], int],
) -> int:
    """What graphs for `seqs` sequences take.

    The two largest are made, over a cache of one block, since each other takes no more than the
    second: they share their memory with the largest. `free` tells the bytes that are left.
    """
    cache = shape.blank(1, model.device)
    graphs = Graphs(model, cache, places, seqs, recorder)
    left = [free()]
    try:
        for size in graphs.sizes[:-3:-1]:
            graphs.capture(size)
            left.append(free())
    except Unrecordable:  # as on all ranks; it is said when all are to be made
        return 0
    first, *others = (max(before - after, 0) for before, after in pairwise(left))
    more = sum(others) * (len(graphs.sizes) - 1)
    return graphs.nbytes + first + more


def _free(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
