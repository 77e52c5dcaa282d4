"""Plain torch: what the Triton kernels compute, and what the engine runs on a CPU."""

from pagedsim.kernels.reference.attention import attend_latent, attention, compress
from pagedsim.kernels.reference.cache import copy_blocks, write_kv
from pagedsim.kernels.reference.layers import (
    add_product,
    experts,
    product,
    rms_norm,
    rotate,
    route,
    silu_mul,
)
from pagedsim.kernels.reference.sampling import keep_top_p, pick

__all__ = [
    "add_product",
    "attend_latent",
    "attention",
    "compress",
    "copy_blocks",
    "experts",
    "keep_top_p",
    "pick",
    "product",
    "rms_norm",
    "rotate",
    "route",
    "silu_mul",
    "write_kv",
]
