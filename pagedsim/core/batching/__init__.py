"""How steps are composed: prefill first, one unified budget, static batches, or one by one."""

from pagedsim.core.batching.base import Batching
from pagedsim.core.batching.prefill_first import OneByOne, PrefillFirst, Static
from pagedsim.core.batching.unified import Unified
from pagedsim.core.compiled import own_abc_registry

__all__ = ["Batching", "OneByOne", "PrefillFirst", "Static", "Unified"]

own_abc_registry(Batching, "compose")
