"""GPU and CPU memory in blocks: paged (with or without a prefix cache) and reserved."""

from pagedsim.core.memory.base import Copies, Fit, Memory, Pairs, Usage
from pagedsim.core.memory.paged import PagedMemory
from pagedsim.core.memory.prefix import PrefixMemory
from pagedsim.core.memory.reserved import ReservedMax, ReservedOracle, ReservedPow2

__all__ = [
    "Copies",
    "Fit",
    "Memory",
    "PagedMemory",
    "Pairs",
    "PrefixMemory",
    "ReservedMax",
    "ReservedOracle",
    "ReservedPow2",
    "Usage",
]
