"""SGLang's scheduler: its batching, and the radix tree that is its prefix cache.

The rules are those of SGLang 0.5.23, in both loops of its scheduler: the one that overlaps a step
with the result of the step before (`async_scheduling`), and the synchronous one. Its orders of the
queue are policies as others are: lpm, dfs_weight, lof, hrrn_tokens, priority. Its hierarchical
cache has tiers below the GPU: the host, and a storage.
"""

from pagedsim.core.batching import Batching
from pagedsim.core.compiled import own_abc_registry
from pagedsim.core.memory import Memory
from pagedsim.sglang.batching import SGLang
from pagedsim.sglang.hicache import HiCache
from pagedsim.sglang.radix import RadixMemory
from pagedsim.sglang.settings import HiCacheOffload
from pagedsim.sglang.storage import PrefetchSettings, StoredHiCache

own_abc_registry(Batching)
own_abc_registry(Memory)

__all__ = [
    "HiCache",
    "HiCacheOffload",
    "PrefetchSettings",
    "RadixMemory",
    "SGLang",
    "StoredHiCache",
]
