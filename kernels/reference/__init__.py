"""Plain torch: what the larger Triton kernels compute, and what the engine runs on a CPU."""

from pagedsim.kernels.reference.attention import attention
from pagedsim.kernels.reference.cache import rows_apart, write
from pagedsim.kernels.reference.sampling import keep_top_p, pick

__all__ = ["attention", "keep_top_p", "pick", "rows_apart", "write"]
