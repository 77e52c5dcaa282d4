"""vLLM's KV offloading: a tier of host memory below the GPU, to which blocks are copied and back.

Start reading at `connector.py`, then `loads.py`; `admission.py` is how waiting requests meet them.
"""

from pagedsim.core.compiled import own_abc_registry
from pagedsim.core.offload.connector import OffloadConnector
from pagedsim.core.offload.eviction import ARC, LRU, ChunkEviction
from pagedsim.core.offload.lower import IndexedTier, LowerTier
from pagedsim.core.offload.settings import Offload, VLLMOffload

__all__ = [
    "ARC",
    "LRU",
    "ChunkEviction",
    "IndexedTier",
    "LowerTier",
    "Offload",
    "OffloadConnector",
    "VLLMOffload",
]

own_abc_registry(ChunkEviction, "insert", "choose", "remove")
