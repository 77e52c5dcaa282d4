"""How many blocks fit: the peak of a real worst-case step, measured, and what is left."""

from __future__ import annotations

import torch

from pagedsim.core import ConfigError
from pagedsim.engine.cache import CacheShape
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.rehearsal import rehearse
from pagedsim.engine.room import GIB

HOST_POOL = 1 * GIB
"""The most that the cache takes by default where there is no GPU."""


def fitting_blocks(
    model: LoadedModel,
    shape: CacheShape,
    *,
    max_model_len: int,
    max_seqs: int,
    max_batched_tokens: int,
    utilization: float,
) -> int:
    """The blocks of a cache beside the weights and the activations of the largest step."""
    needed = -(-max_model_len // shape.block_size)
    useful = max_seqs * needed
    if model.device.type != "cuda":
        return max(min(useful, HOST_POOL // shape.block_bytes), needed)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    free, total = torch.cuda.mem_get_info(model.device)
    others = total - free - torch.cuda.memory_reserved(model.device)
    worst_step(model, shape, max_seqs, max_batched_tokens)
    peak = torch.cuda.max_memory_allocated(model.device) + others
    torch.cuda.empty_cache()
    blocks = int((total * utilization - peak) // shape.block_bytes)
    if blocks < needed:
        raise ConfigError(
            f"gpu_memory_utilization={utilization}: {total * utilization / GIB:.1f} GiB, of which "
            f"weights, activations and others take {peak / GIB:.1f}, leave {max(blocks, 0)} blocks "
            f"of {shape.block_bytes / 2**20:.2f} MiB: one request of max_model_len={max_model_len} "
            f"needs {needed}; raise gpu_memory_utilization, or lower max_model_len or "
            f"max_num_batched_tokens={max_batched_tokens}"
        )
    return min(blocks, useful)


def worst_step(model: LoadedModel, shape: CacheShape, seqs: int, tokens: int) -> None:
    """Compute as many tokens as a step may, in as many sequences as may sample."""
    seqs = min(seqs, tokens)
    lengths = [tokens // seqs + (i < tokens % seqs) for i in range(seqs)]
    blocks = -(-max(lengths) // shape.block_size)
    cache = torch.zeros(blocks, *shape.block, dtype=shape.dtype, device=model.device)
    rehearse(model, cache, shape.block_size, [(0, length) for length in lengths])
