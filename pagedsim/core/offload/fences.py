"""Blocks that are free although a store reads them still: whoever takes one waits for the store."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Fences:
    """The stores of requests that have ended, by the blocks that they read."""

    def __init__(self) -> None:
        self._jobs: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._jobs.setdefault(block, set()).add(job)

    def remove(self, job: int, blocks: Iterable[int]) -> None:
        """The store has ended."""
        for block in blocks:
            if (jobs := self._jobs.get(block)) is not None:
                jobs.discard(job)
                if not jobs:
                    del self._jobs[block]

    def crossed(self, blocks: Collection[int]) -> set[int]:
        """The stores that read any of these blocks."""
        jobs = self._jobs
        return {job for block in jobs.keys() & blocks for job in jobs[block]} if jobs else set()
