"""GPU and CPU memory in blocks: paged (with a prefix cache, or over tiers) and reserved."""

from pagedsim.core.compiled import own_abc_registry
from pagedsim.core.memory.base import Copies, Fit, Memory, Move, Pairs, Place, PrefixNode, Usage
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
from pagedsim.core.memory.tier import Tier
from pagedsim.core.memory.tiered import TieredMemory

__all__ = [
    "CacheEntry",
    "Copies",
    "EvictionPolicy",
    "Fit",
    "Memory",
    "Move",
    "PagedMemory",
    "Pairs",
    "Place",
    "PrefixMemory",
    "PrefixNode",
    "ReservedMax",
    "ReservedOracle",
    "ReservedPow2",
    "Tier",
    "TieredMemory",
    "Usage",
]

own_abc_registry(ReservedMemory, "reservation")
own_abc_registry(Memory, "free", "admit", "extend", "release")
