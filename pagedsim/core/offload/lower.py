"""Tiers below the host tier: a chunk goes down by a cascade, and comes back by a promotion."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import require_flag, require_number
from pagedsim.core.request import RequestId


@mypyc_attr(allow_interpreted_subclasses=True)
class LowerTier:
    """A store without bounds whose answers and jobs take constant times."""

    def __init__(
        self,
        store: float = 0.0,
        load: float = 0.0,
        lookup: float = 0.0,
        at_once: object = False,
    ) -> None:
        """`store`, `load`: the time until a job can be collected. `lookup`: for so long after a
        request first asked for a chunk the answer is not known. `at_once`: a chunk is found as soon
        as it is sent."""
        self._store = require_number("store", store, 0)
        self._load = require_number("load", load, 0)
        self._lookup = require_number("lookup", lookup, 0)
        self._at_once = require_flag("at_once", at_once)
        self._has: dict[Hashable, bool] = {}  # whether it can be found yet
        self._asked: dict[RequestId, dict[Hashable, float]] = {}
        self._open: list[tuple[float, int, Sequence[Hashable]]] = []

    def __len__(self) -> int:
        """Chunks that it has or is being sent."""
        return len(self._has)

    def find(self, key: Hashable, request: RequestId, now: float) -> bool | None:
        """Whether it has a chunk; None: not known yet."""
        if self._lookup:
            asked = self._asked.setdefault(request, {}).setdefault(key, now)
            if now < asked + self._lookup:
                return None
        return self._has.get(key, False)

    def store(self, job: int, keys: Sequence[Hashable], now: float) -> None:
        """It is sent these chunks."""
        for key in keys:
            self._has.setdefault(key, self._at_once)
        self._open.append((now + self._store, job, keys))

    def load(self, job: int, keys: Sequence[Hashable], now: float) -> None:
        """It sends these chunks, which it has."""
        self._open.append((now + self._load, job, ()))

    def collect(self, now: float) -> list[int]:
        """The jobs that have ended by now and were not collected before."""
        done = [entry for entry in self._open if entry[0] <= now]
        if done:
            self._open = [entry for entry in self._open if entry[0] > now]
        for _, _, keys in done:
            for key in keys:
                self._has[key] = True
        return [job for _, job, _ in done]

    def forget(self, request: RequestId) -> None:
        """A request has ended."""
        self._asked.pop(request, None)

    def clear(self) -> None:
        """Lose everything."""
        self._has.clear()
        self._asked.clear()
        self._open.clear()
