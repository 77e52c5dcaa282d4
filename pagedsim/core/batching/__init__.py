"""How steps are composed: prefill first, one unified budget, or static batches."""

from pagedsim.core.batching.base import Batching
from pagedsim.core.batching.prefill_first import PrefillFirst
from pagedsim.core.batching.static import Static
from pagedsim.core.batching.unified import Unified

__all__ = ["Batching", "PrefillFirst", "Static", "Unified"]
