"""Write a step's keys and values into the cache, and copy whole blocks within it: copy on write.

No FLOP. A write of T tokens, KV heads and D dims reads and writes 4·T·KV·D elements (K and V), and
8 bytes of slots a token: bound by the bytes in a prefill, by its launch in a decode. A copy reads
and writes one block over all layers, one contiguous run (2 MiB for 16 tokens of Llama-3-8B): bound
by the bytes; many programs a block, so that a single copy fills the GPU.
"""

import torch
import triton
import triton.language as tl

from pagedsim.kernels import float8
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.rounding import mantissa, stored
from pagedsim.kernels.tiles import power_of_two


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
) -> None:
    """As `ops.write_kv`, which says what the arguments are."""
    tokens, heads, head_dim = k.shape
    if tokens == 0:
        return
    elements = heads * head_dim
    block = min(4096, power_of_two(elements))
    _write[(tokens, -(-elements // block))](
        k,
        v,
        float8.raw(k_cache),
        float8.raw(v_cache),
        batch.slots,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        ELEMENTS=elements,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK=block,
        MANTISSA=mantissa(k_cache),
        num_warps=max(1, min(8, block // 256)),  # 16 bytes a thread and tensor, in 16 bits
    )


@triton.jit
def _write(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_block_stride,
    k_slot_stride,
    k_cache_head_stride,
    v_block_stride,
    v_slot_stride,
    v_cache_head_stride,
    ELEMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,  # see stored()
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slots_ptr + token)
    if place < 0:  # padding
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = element < ELEMENTS
    head = element // HEAD_DIM
    column = element % HEAD_DIM
    block = place // BLOCK_SIZE
    slot = place % BLOCK_SIZE
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + column, mask=held)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + column, mask=held)
    k_at = k_cache_ptr + block * k_block_stride + slot * k_slot_stride
    v_at = v_cache_ptr + block * v_block_stride + slot * v_slot_stride
    k_at += head * k_cache_head_stride + column
    v_at += head * v_cache_head_stride + column
    tl.store(k_at, stored(k, k_cache_ptr, MANTISSA), mask=held)
    tl.store(v_at, stored(v, v_cache_ptr, MANTISSA), mask=held)


CHUNK = 8192
"""Elements a program copies."""


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """As `ops.copy_blocks`, which says what the arguments are."""
    cache = float8.raw(cache)
    elements = cache[0].numel()
    if sources.numel() == 0:
        return
    _copy[(-(-elements // CHUNK), sources.numel())](
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
