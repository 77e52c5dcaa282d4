"""Plain torch: what the Triton kernels compute, and what the engine runs on a CPU."""

from kernels.reference.attention import attention, batch_of
from kernels.reference.copy import copy_blocks
from kernels.reference.write import write_kv, write_step

__all__ = ["attention", "batch_of", "copy_blocks", "write_kv", "write_step"]
