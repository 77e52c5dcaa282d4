"""Paged attention, what stands around it in a decoder, and top-p: Triton kernels, each beside the
plain torch function that says what it computes.

`kernels.ops` says what there is; what runs is chosen by where the tensors are.
"""

from kernels.batch import AttentionBatch
from kernels.ops import (
    attend,
    attend_cached,
    copy_blocks,
    keep_top_p,
    paged_attention,
    paged_decode,
    rms_norm,
    rotate,
    silu_mul,
    write_kv,
)

__all__ = [
    "AttentionBatch",
    "attend",
    "attend_cached",
    "copy_blocks",
    "keep_top_p",
    "paged_attention",
    "paged_decode",
    "rms_norm",
    "rotate",
    "silu_mul",
    "write_kv",
]
