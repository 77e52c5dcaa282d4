"""What each replica of a fleet did, added up as its steps go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class ReplicaFacts:
    """What is known of a replica before it has served anybody."""

    name: str
    total_blocks: float
    block_size: float
    max_seqs: float
    pool: str = ""
    role: str = "both"
    hardware: str = ""


class Columns(Protocol):
    """Steps, of which columns are asked for by name."""

    def __getitem__(self, name: str, /) -> Array: ...


class Lanes:
    """Sums over the steps of each replica, and when its requests came and went."""

    def __init__(self, facts: Sequence[ReplicaFacts]) -> None:
        self.facts = facts
        self.busy = np.zeros(len(facts))
        """Seconds in steps."""
        self.used = np.zeros(len(facts))
        """Blocks in use, times seconds."""
        self.batches = np.zeros(len(facts))
        """Sequences in steps, times seconds."""
        self.here = np.zeros(len(facts))
        """Requests that were there in its steps, times seconds."""
        self.computed = np.zeros(len(facts), dtype=np.int64)
        """Tokens of prompts that steps computed, and one of each sequence that decoded in one."""
        self._changes: dict[str, list[tuple[Array, Array, Array]]] = {}

    def add(self, index: int, steps: Columns) -> None:
        """Some more steps of a replica, in order."""
        start, end, decodes = steps["start"], steps["end"], steps["decode_seqs"]
        seconds, here = end - start, present(steps)
        self.busy[index] += seconds.sum()
        self.used[index] += seconds @ steps["used_blocks"]
        self.batches[index] += seconds @ (decodes + steps["prefill_requests"])
        self.here[index] += seconds @ here
        self.computed[index] += steps["prefill_tokens"].sum(dtype=np.int64)
        self.computed[index] += decodes.sum(dtype=np.int64)
        changes = self._changes.setdefault(self.facts[index].role, [])
        changes.append(_changes(*course(start, end, here)))

    @property
    def load(self) -> NDArray[np.float64]:
        """Tokens computed, over the mean of all replicas of a role: what those of others do is no
        measure. NaN where they computed none."""
        roles = np.array([one.role for one in self.facts])
        found = np.full(len(roles), np.nan)
        for role in np.unique(roles):
            mine = self.computed[roles == role]
            if mine.any():
                found[roles == role] = mine / mine.mean()
        return found

    def imbalance(self) -> float:
        """The standard deviation of the requests at replicas of a role, over their mean; of all
        moments, each counted by its requests."""
        off = there = 0.0
        for role, changes in self._changes.items():
            count = sum(one.role == role for one in self.facts)
            times, first, second = (np.concatenate(every) for every in zip(*changes, strict=True))
            order = np.argsort(times, kind="stable")
            seconds = np.diff(times[order])
            sums, squares = np.cumsum(first[order])[:-1], np.cumsum(second[order])[:-1]
            # The deviation, times the number of replicas: whole numbers, so it is exact.
            off += float(seconds @ np.sqrt(count * squares - sums * sums))
            there += float(seconds @ sums)
        return off / there if there else float("nan")


def present(steps: Columns) -> Array:
    """Requests that wait, run or are swapped out, in each step."""
    return np.asarray(steps["waiting"] + steps["running"] + steps["swapped"])


def course(start: Array, end: Array, values: Array) -> tuple[Array, Array]:
    """When a value changed, and to what: that of each step, and 0 between steps."""
    pause = np.append(start[1:] > end[:-1], True)
    times = np.stack((start, end), axis=1).ravel()
    told = np.stack((values, np.zeros_like(values)), axis=1).ravel()
    kept = np.stack((np.ones(len(start), dtype=bool), pause), axis=1).ravel()
    times, told = times[kept], told[kept]
    new = np.append(True, told[1:] != told[:-1])[: len(told)]
    return times[new], told[new]


def _changes(times: Array, values: Array) -> tuple[Array, Array, Array]:
    """By how much a value changed when, and its square."""
    values = values.astype(np.int64)
    return times, np.diff(values, prepend=0), np.diff(values * values, prepend=0)
