"""Plain torch: what the Triton kernels compute, and what the engine runs on a CPU."""

from pagedsim.kernels.reference.attention import attention, batch_of
from pagedsim.kernels.reference.copy import copy_blocks
from pagedsim.kernels.reference.draw import pick
from pagedsim.kernels.reference.experts import experts
from pagedsim.kernels.reference.gate import silu_mul
from pagedsim.kernels.reference.latent import attend_latent, compress
from pagedsim.kernels.reference.norm import rms_norm
from pagedsim.kernels.reference.nucleus import keep_top_p
from pagedsim.kernels.reference.product import add_product, product
from pagedsim.kernels.reference.rotary import rotate
from pagedsim.kernels.reference.route import route
from pagedsim.kernels.reference.write import write_kv, write_step

__all__ = [
    "add_product",
    "attend_latent",
    "attention",
    "batch_of",
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
    "write_step",
]
