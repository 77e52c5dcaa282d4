"""How far a study is: numbers that the runs share with a bar on the terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.text import Text

if TYPE_CHECKING:
    from pagedsim.run.stoppable import StoppableRecorder

_PERIOD = 0.2
"""Seconds between two looks at a run."""
_SURE = 0.02
"""The share that must be done before the time left is guessed."""


class Board:
    """Three numbers a run, in memory that processes share: requests, of these done, and time.

    A run does nothing for it: a thread beside it looks at its recorder now and then.
    """

    def __init__(self, runs: int, measured: bool = False) -> None:
        """`measured`: time passes in them as it does here."""
        self.runs, self.measured = runs, measured
        self._numbers = RawArray("d", 3 * runs)

    @contextmanager
    def watching(self, run: int, recorder: StoppableRecorder) -> Iterator[None]:
        """Note how far `recorder` is while the body runs, and at its end."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_PERIOD):
                self._note(run, recorder)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._note(run, recorder)

    def _note(self, run: int, recorder: StoppableRecorder) -> None:
        self._numbers[3 * run : 3 * run + 3] = [
            float(recorder.requests),
            float(recorder.left_count),
            recorder.time,
        ]

    @property
    def requests(self) -> int:
        """Requests of all runs; those that have not begun count as the average of the others."""
        known = [n for n in self._numbers[::3] if n]
        return round(sum(known) / len(known) * self.runs) if known else 0

    @property
    def done(self) -> int:
        """Requests that have left, of all runs."""
        return round(sum(self._numbers[1::3]))

    @property
    def time(self) -> float:
        """Seconds of all runs, as each counts them."""
        return sum(self._numbers[2::3])

    @property
    def share(self) -> float:
        """How much is done, from 0 to 1."""
        return min(self.done / self.requests, 1.0) if self.requests else 0.0


class _Runs(ProgressColumn):
    """Runs done, of all."""

    def __init__(self, over: Sequence[object], runs: int) -> None:
        super().__init__()
        self.over, self.runs = over, runs

    def render(self, task: Task) -> Text:
        return Text(f"{len(self.over)}/{self.runs} runs")


class _Words(ProgressColumn):
    """Requests done, time in the runs, time left."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self.board = board

    def render(self, task: Task) -> Text:
        board, spent = self.board, task.elapsed or 0.0
        parts = [f"{board.done:,}/{board.requests:,} requests"] if board.requests else []
        parts.append(f"{clock(board.time)} {'served' if board.measured else 'simulated'}")
        if board.share > _SURE:
            parts.append(f"{clock(spent * (1 - board.share) / board.share)} left")
        return Text(", ".join(parts), style="dim")


class _Bar(BarColumn):
    def __init__(self, board: Board) -> None:
        super().__init__(bar_width=16)
        self.board = board

    def render(self, task: Task) -> ProgressBar:
        task.completed = self.board.share * (task.total or 1)
        return super().render(task)


def on_terminal() -> bool:
    """Whether anybody would see a bar."""
    return sys.stderr.isatty()


@contextmanager
def bar(board: Board | None, over: Sequence[object]) -> Iterator[None]:
    """Show a bar while the body runs; `over` is the list to which it appends what is done."""
    if board is None:
        yield
        return
    columns = (_Runs(over, board.runs), _Bar(board), _Words(board))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        progress.add_task("runs", total=1.0)
        yield


def clock(seconds: float) -> str:
    """A time for reading.

    >>> clock(7.4), clock(90), clock(7322)
    ('7 s', '1:30', '2:02:02')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
