"""Per-replica sums over the steps of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class ReplicaFacts:
    """Static properties of a replica."""

    name: str
    total_blocks: float
    block_size: float
    max_seqs: float
    pool: str = ""
    role: str = "both"
    hardware: str = ""


class Columns(Protocol):
    """Steps with columns by name."""

    def __getitem__(self, name: str, /) -> Array: ...


class ReplicaSums:
    """Sums over the steps of each replica, and its number of requests over time."""

    def __init__(self, facts: Sequence[ReplicaFacts]) -> None:
        self.facts = facts
        self.busy = np.zeros(len(facts))
        """Seconds in steps."""
        self.used = np.zeros(len(facts))
        """Block-seconds in use."""
        self.batches = np.zeros(len(facts))
        """Sequence-seconds in steps."""
        self.request_seconds = np.zeros(len(facts))
        """Request-seconds in steps, queued ones included."""
        self.computed = np.zeros(len(facts), dtype=np.int64)
        """Computed prompt tokens plus decoded sequences."""
        self._changes: dict[str, list[tuple[Array, Array, Array]]] = {}

    def add(self, index: int, steps: Columns) -> None:
        """Add further steps of a replica, in order."""
        start, end, decodes = steps["start"], steps["end"], steps["decode_seqs"]
        seconds, requests = end - start, present(steps)
        self.busy[index] += seconds.sum()
        self.used[index] += seconds @ steps["used_blocks"]
        self.batches[index] += seconds @ (decodes + steps["prefill_requests"])
        self.request_seconds[index] += seconds @ requests
        self.computed[index] += steps["prefill_tokens"].sum(dtype=np.int64)
        self.computed[index] += decodes.sum(dtype=np.int64)
        changes = self._changes.setdefault(self.facts[index].role, [])
        changes.append(_changes(*course(start, end, requests)))

    @property
    def load(self) -> NDArray[np.float64]:
        """Tokens computed over the mean of all replicas of the same role; NaN for none."""
        roles = np.array([replica.role for replica in self.facts])
        relative = np.full(len(roles), np.nan)
        for role in np.unique(roles):
            mine = self.computed[roles == role]
            if mine.any():
                relative[roles == role] = mine / mine.mean()
        return relative

    def imbalance(self) -> float:
        """Coefficient of variation of the number of requests over the replicas of a role, averaged
        over time with the number of requests as weight."""
        deviation = total = 0.0
        for role, changes in self._changes.items():
            count = sum(replica.role == role for replica in self.facts)
            times, first, second = (np.concatenate(every) for every in zip(*changes, strict=True))
            order = np.argsort(times, kind="stable")
            seconds = np.diff(times[order])
            sums, squares = np.cumsum(first[order])[:-1], np.cumsum(second[order])[:-1]
            # The deviation times the number of replicas: exact in integers.
            deviation += float(seconds @ np.sqrt(count * squares - sums * sums))
            total += float(seconds @ sums)
        return deviation / total if total else float("nan")


def present(steps: Columns) -> Array:
    """Waiting, running and swapped requests in each step."""
    return np.asarray(steps["waiting"] + steps["running"] + steps["swapped"])


def course(start: Array, end: Array, values: Array) -> tuple[Array, Array]:
    """Change points of a value that is given per step and is 0 between steps."""
    pause = np.append(start[1:] > end[:-1], True)
    times = np.stack((start, end), axis=1).ravel()
    changes = np.stack((values, np.zeros_like(values)), axis=1).ravel()
    kept = np.stack((np.ones(len(start), dtype=bool), pause), axis=1).ravel()
    times, changes = times[kept], changes[kept]
    new = np.append(True, changes[1:] != changes[:-1])[: len(changes)]
    return times[new], changes[new]


def _changes(times: Array, values: Array) -> tuple[Array, Array, Array]:
    """Change points with the increments of the value and of its square."""
    values = values.astype(np.int64)
    return times, np.diff(values, prepend=0), np.diff(values * values, prepend=0)
