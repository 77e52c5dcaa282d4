"""Memory that a server no longer uses goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from functools import cache

IDLE = 2.0
"""Seconds without requests after which garbage is collected, once."""
TRIM = 20.0
"""Seconds between two returns of free heap pages."""


class Tidy:
    """Collects garbage when the server falls idle, and returns free pages of the heap.

    Python collects by the number of allocations, so an idle server would keep what its last
    requests left. glibc returns only the end of a heap, so free pages between long-lived objects
    would stay resident: with tensors of every size a server of the engine grows for as long as it
    runs.
    """

    def __init__(
        self,
        collect: Callable[[], object] = gc.collect,
        trim: Callable[[], object] | None = None,
    ) -> None:
        self._collect, self._trim = collect, trim or trim_heap
        self._busy_at: float | None = None  # when requests were last seen, if not tidied since
        self._trimmed_at = 0.0

    def tick(self, now: float, busy: bool) -> Callable[[], object] | None:
        """It is `now`, in seconds; returns what is to be called in another thread, if anything."""
        if busy:
            self._busy_at = now
        if self._busy_at is None:
            return None
        if idle := now - self._busy_at >= IDLE:
            self._busy_at = None
            self._collect()
        if idle or now - self._trimmed_at >= TRIM:
            self._trimmed_at = now
            return self._trim
        return None


def trim_heap() -> None:
    """Return the free pages of all heaps to the system, where the C library is glibc."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
