"""How many blocks fit: the peak of a real worst-case step, measured, and what is left."""

from __future__ import annotations

import torch

from kernels import AttentionBatch
from pagedsim.core import ConfigError
from pagedsim.engine.cache import CacheShape
from pagedsim.engine.models import LoadedModel

GIB = 2**30
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


@torch.inference_mode()
def worst_step(model: LoadedModel, shape: CacheShape, seqs: int, tokens: int) -> None:
    """Compute as many tokens as a step may, in as many sequences as may sample."""
    seqs = min(seqs, tokens)
    lengths = [tokens // seqs + (i < tokens % seqs) for i in range(seqs)]
    blocks = -(-max(lengths) // shape.block_size)
    # All write to the same few blocks: what they hold does not matter, how many tokens run does.
    cache = torch.zeros(blocks, *shape.block, dtype=shape.dtype, device=model.device)
    batch = AttentionBatch.build(
        [list(range(blocks))] * seqs,
        [0] * seqs,
        lengths,
        block_size=shape.block_size,
        device=model.device,
    )
    ids = torch.zeros(tokens, dtype=torch.int64, device=model.device)
    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    ends = torch.tensor(lengths, device=model.device).cumsum(0) - 1
    logits = model.forward(ids, positions, batch, cache, ends)
    torch.softmax(logits, dim=-1).argmax(dim=-1).tolist()  # a sampler's temporaries
