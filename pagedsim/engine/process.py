"""Process-wide state: deferred SIGINT, and torch's CPU threads."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch


class uninterrupted:
    """Within, a Ctrl-C waits: what is inside is done as a whole, or not begun.

    A class, since a step enters twice, and a generator would take as long as the signals do.
    """

    __slots__ = ("_before", "_came")

    def __init__(self) -> None:
        self._before: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, self._note)
            if callable(before):
                self._before = before
            else:  # ignored, or not Python's affair
                signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._came is not None:
                self._before(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame


class Threads:
    """torch's CPU threads: what engines have set, and what there was before the first of them."""

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
