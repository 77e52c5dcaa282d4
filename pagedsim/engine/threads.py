"""The threads on which torch computes while there are engines on the CPU."""

from __future__ import annotations

import torch


class Threads:
    """What engines have set, and what there was before the first of them."""

    def __init__(self) -> None:
        self._before = 0
        self._set = 0
        self._engines = 0

    def take(self, count: int) -> None:
        """An engine computes on so many threads from now on."""
        if not self._engines:
            self._before = torch.get_num_threads()
        self._engines += 1
        self._set = count
        torch.set_num_threads(count)

    def give_back(self) -> None:
        """An engine is closed: after the last one torch has as many as before, unless that was
        changed since."""
        self._engines -= 1
        if not self._engines and torch.get_num_threads() == self._set:
            torch.set_num_threads(self._before)


THREADS = Threads()
