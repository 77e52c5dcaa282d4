"""The tiers below the host tier of the recordings: without bounds, and with constant times."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pagedsim.core.offload import LowerTier
from pagedsim.core.offload.eviction import HostChunk
from pagedsim.core.request import RequestId


class ConstantTier(LowerTier):
    """A store without bounds whose answers and jobs take constant times."""

    def __init__(
        self, store: float = 0.0, load: float = 0.0, lookup: float = 0.0, at_once: bool = False
    ) -> None:
        """`store`, `load`: the time until a job can be collected. `lookup`: for so long after a
        request first asked for a chunk the answer is not known. `at_once`: a chunk is found as soon
        as it is sent."""
        self._store, self._load, self._lookup, self._at_once = store, load, lookup, at_once
        self._has: dict[Hashable, bool] = {}  # whether it can be found yet
        self._asked: dict[RequestId, dict[Hashable, float]] = {}
        self._open: list[tuple[float, int, Sequence[Hashable]]] = []

    def __len__(self) -> int:
        """Chunks that it has or is being sent."""
        return len(self._has)

    def find(self, key: Hashable, request: RequestId, now: float) -> bool | None:
        if self._lookup:
            asked = self._asked.setdefault(request, {}).setdefault(key, now)
            if now < asked + self._lookup:
                return None
        return self._has.get(key, False)

    def store(self, job: int, chunks: Sequence[HostChunk], now: float) -> None:
        keys = [chunk.key for chunk in chunks]
        for key in keys:
            self._has.setdefault(key, self._at_once)
        self._open.append((now + self._store, job, keys))

    def load(self, job: int, chunks: Sequence[HostChunk], now: float) -> None:
        self._open.append((now + self._load, job, ()))

    def collect(self, now: float) -> list[int]:
        done = [entry for entry in self._open if entry[0] <= now]
        self._open = [entry for entry in self._open if entry[0] > now]
        for _, _, keys in done:
            self._has.update(dict.fromkeys(keys, True))
        return [job for _, job, _ in done]

    def forget(self, request: RequestId) -> None:
        self._asked.pop(request, None)

    def clear(self) -> None:
        self._has.clear()
        self._asked.clear()
        self._open.clear()
