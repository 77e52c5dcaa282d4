"""GPU and CPU memory in blocks: paged (with a prefix cache) and reserved."""

from pagedsim.core.compiled import own_abc_registry
from pagedsim.core.memory.base import Copies, Fit, Memory, Pairs, PrefixNode, Usage
from pagedsim.core.memory.cache_entry import CacheEntry
from pagedsim.core.memory.eviction_policy import EvictionPolicy
from pagedsim.core.memory.paged import PagedMemory
from pagedsim.core.memory.prefix import PrefixMemory
from pagedsim.core.memory.reserved import (
    ReservedMax,
    ReservedMemory,
    ReservedOracle,
    ReservedPow2,
)

__all__ = [
    "CacheEntry",
    "Copies",
    "EvictionPolicy",
    "Fit",
    "Memory",
    "PagedMemory",
    "Pairs",
    "PrefixMemory",
    "PrefixNode",
    "ReservedMax",
    "ReservedOracle",
    "ReservedPow2",
    "Usage",
]

own_abc_registry(ReservedMemory, "reservation")
own_abc_registry(Memory, "free", "admit", "extend", "release")
