"""How steps are composed: prefill first, one unified budget, static batches, or one by one."""

from pagedsim.core.batching.base import Batching
from pagedsim.core.batching.one_by_one import OneByOne
from pagedsim.core.batching.prefill_first import PrefillFirst
from pagedsim.core.batching.static import Static
from pagedsim.core.batching.unified import Unified
from pagedsim.core.compiled import apart

__all__ = ["Batching", "OneByOne", "PrefillFirst", "Static", "Unified"]

apart(Batching)
