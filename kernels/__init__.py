"""Paged attention: Triton kernels, each beside the plain torch function that says what it computes.

`kernels.ops` says what there is; what runs is chosen by where the tensors are.
"""

from kernels.batch import AttentionBatch
from kernels.ops import attend, copy_blocks, paged_attention, paged_decode, write_kv

__all__ = [
    "AttentionBatch",
    "attend",
    "copy_blocks",
    "paged_attention",
    "paged_decode",
    "write_kv",
]
