"""Plain torch: what the Triton kernels compute, and what the engine runs on a CPU."""

from kernels.reference.attention import attention, batch_of
from kernels.reference.copy import copy_blocks
from kernels.reference.gate import silu_mul
from kernels.reference.norm import rms_norm
from kernels.reference.nucleus import keep_top_p
from kernels.reference.rotary import rotate
from kernels.reference.write import write_kv, write_step

__all__ = [
    "attention",
    "batch_of",
    "copy_blocks",
    "keep_top_p",
    "rms_norm",
    "rotate",
    "silu_mul",
    "write_kv",
    "write_step",
]
