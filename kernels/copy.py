"""Copy whole blocks within a cache: copy on write.

No FLOP; a copy reads and writes one block over all layers, one contiguous run (2 MiB for 16 tokens
of Llama-3-8B). Bound by the bytes; many programs a block, so that a single copy fills the GPU.
"""

import torch
import triton
import triton.language as tl

from pagedsim.kernels import float8

CHUNK = 8192
"""Elements a program copies."""


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """As `ops.copy_blocks`, which says what the arguments are."""
    cache = float8.raw(cache)
    elements = cache[0].numel()
    if sources.numel() == 0:
        return
    _copy[(triton.cdiv(elements, CHUNK), sources.numel())](
        cache, sources, targets, cache.stride(0), elements, CHUNK=CHUNK, num_warps=8
    )


@triton.jit
def _copy(cache_ptr, sources_ptr, targets_ptr, stride, elements, CHUNK: tl.constexpr):
    chunk = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    held = chunk < elements
    source = tl.load(sources_ptr + tl.program_id(1)).to(tl.int64)
    target = tl.load(targets_ptr + tl.program_id(1)).to(tl.int64)
    run = tl.load(cache_ptr + source * stride + chunk, mask=held)
    tl.store(cache_ptr + target * stride + chunk, run, mask=held)
