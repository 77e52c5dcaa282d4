"""Runs in processes, their signals, and a progress bar."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from multiprocessing.sharedctypes import RawArray
from time import monotonic
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.text import Text

from pagedsim.backends.base import StoppableRecorder
from pagedsim.run.job import Failure, Interrupted, Job, Outcome, run_job
from pagedsim.run.parts import Parts
from pagedsim.spec.run import RunSpec

_DIED = "a process died, perhaps for want of memory; fewer jobs= take less"
_UNGUARDED = (
    "processes could not begin: each imports the script again, whose calls of pagedsim must stand "
    'under `if __name__ == "__main__":`; jobs=1 needs no processes'
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Both ask to stop: a Ctrl-C, and a batch system whose time is up."""

Done = Callable[[Job, Outcome], None]
"""Called with every outcome as it comes."""


class _NotBegun(KeyboardInterrupt):
    """Asked to stop before the first step."""


class StopSignal:
    """Notes a signal, and stops the run between two steps, where all that is recorded is whole."""

    def __init__(self, patient: bool) -> None:
        """`patient`: asked again it does nothing more; otherwise it breaks off at once."""
        self.asked = False
        self.recorder: StoppableRecorder | None = None
        self._patient = patient

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked and not self._patient:
            raise KeyboardInterrupt
        self.asked = True
        if self.recorder is not None and not (self._patient or self.recorder.started):
            raise _NotBegun  # nothing is there that could be kept, and a model may take long
        if self.recorder is not None:
            self.recorder.stop()

    def run(
        self, number: int, job: Job, board: Board | None, parts: Parts | None = None
    ) -> Outcome:
        """One run, unless it has been asked to stop already; `parts` are its objects, if built."""
        self.recorder = recorder = StoppableRecorder()
        if self.asked:
            return Interrupted()
        try:
            with board.watching(number, recorder) if board else nullcontext():
                return run_job(job, recorder, parts)
        except _NotBegun:
            return Interrupted()
        finally:
            self.recorder = None


def run_jobs(
    jobs: Sequence[Job],
    processes: int,
    done: Done,
    built: dict[tuple[str, int], Parts],
    kept: int = 0,
) -> bool:
    """Run them all, beside those that were `kept`; returns whether that was interrupted.

    One process means this one, for which `built` has objects of some jobs. Interrupted, the runs
    under way write what they have.
    """
    shown = jobs and (on_terminal() or in_notebook()) and not inside_a_worker()
    board = Board(len(jobs), RunSpec(jobs[0].config).backend.alone, kept) if shown else None
    over: list[Job] = []

    def note_outcome(job: Job, outcome: Outcome) -> None:
        done(job, outcome)
        over.append(job)  # last: a job that is interrupted in between is reported again

    if processes <= 1 or len(jobs) <= 1:
        return _in_this_process(jobs, board, over, note_outcome, built)
    built.clear()
    return _in_processes(jobs, min(processes, len(jobs)), board, over, note_outcome)


def inside_a_worker() -> bool:
    """Whether this process is one of several already."""
    return multiprocessing.parent_process() is not None


def importing_the_script() -> bool:
    """Whether this process is one of several that has yet to begin: it imports the script."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def way_to_begin() -> str:
    """How processes begin: as the script has set it, else the fastest way that is safe.

    A fork shares what is there already; elsewhere than on Linux it is not safe.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or ("fork" if sys.platform == "linux" else "spawn")


def _in_this_process(
    jobs: Sequence[Job],
    board: Board | None,
    over: list[Job],
    done: Done,
    built: dict[tuple[str, int], Parts],
) -> bool:
    stop = StopSignal(patient=False)
    with _handling(stop), bar(board, over):
        for number, job in enumerate(jobs):
            done(job, stop.run(number, job, board, built.pop((job.arm, job.number), None)))
            if stop.asked:
                return True
    return False


def _in_processes(
    jobs: Sequence[Job], processes: int, board: Board | None, over: list[Job], done: Done
) -> bool:
    started = RawArray("b", 1)  # whether any process has come as far as _enter
    context = multiprocessing.get_context(way_to_begin())
    pool = ProcessPoolExecutor(processes, context, _enter, (board, started))
    with _blocked(), _handling(signal.default_int_handler):
        # Processes begin here: before any thread does, and deaf until they know what to do.
        futures = {pool.submit(_work, number, job): job for number, job in enumerate(jobs)}
    with pool, _handling(signal.default_int_handler), bar(board, over):
        try:
            for future in as_completed(futures):
                done(futures[future], _outcome(future, started))
        except KeyboardInterrupt:
            _stop(futures, started, over, done)
            return True
    return False


def _stop(
    futures: dict[Future[Outcome], Job], started: Sequence[int], over: list[Job], done: Done
) -> None:
    """Wait for what the runs under way can still write; a second Ctrl-C does not wait.

    Jobs that have not begun are not taken back: a process that was asked to stop gives each
    another `Interrupted` at once, and a pool that breaks meanwhile may answer all of them.
    """
    try:
        for child in multiprocessing.active_children():
            if child.pid is not None:  # a Ctrl-C reaches all, but another signal only this one
                os.kill(child.pid, signal.SIGINT)
        for future in as_completed(futures):
            if not any(futures[future] is job for job in over):
                done(futures[future], _outcome(future, started))
    except KeyboardInterrupt:
        _kill()
        raise


def _outcome(future: Future[Outcome], started: Sequence[int]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        _kill()  # the results of the others would be lost
        return Failure(_DIED if started[0] else _UNGUARDED)


def _kill() -> None:
    for child in multiprocessing.active_children():
        child.kill()


# -- in a worker -----------------------------------------------------------------------------------

_stop_signal = StopSignal(patient=True)
_board: Board | None = None


def _enter(board: Board | None, started: Any) -> None:
    """A worker begins."""
    global _board
    gc.freeze()  # collections would look through what it was forked with, and copy its pages
    _board, started[0] = board, 1
    for number in _SIGNALS:
        signal.signal(number, _stop_signal)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_the_study, daemon=True).start()


def _end_with_the_study() -> None:
    """End this worker when the process that began it is gone, which else it would not notice."""
    study = multiprocessing.parent_process()
    assert study is not None
    study.join()
    os._exit(1)


def _work(number: int, job: Job) -> Outcome:
    outcome = _stop_signal.run(number, job, _board)
    return outcome.sendable() if isinstance(outcome, Failure) else outcome


# -- signals ---------------------------------------------------------------------------------------


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle both signals so in the body, where this is the thread that gets signals."""
    try:
        before = {number: signal.signal(number, handler) for number in _SIGNALS}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextmanager
def _blocked() -> Iterator[None]:
    """Keep both signals waiting."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


_WIDTH = 80
"""Characters of a line that is written over."""
_PERIOD = 0.2
"""Seconds between two looks at a run."""
_SURE = 0.02
"""The share that must be done before the time left is guessed."""


class Board:
    """Three numbers a run, in memory that processes share: requests, of these done, and time.

    A run does nothing for it: a thread beside it looks at its recorder now and then.
    """

    def __init__(self, runs: int, measured: bool = False, kept: int = 0) -> None:
        """`measured`: time passes in them as it does here; `kept`: runs that were there before."""
        self.runs, self.measured, self.kept = runs, measured, kept
        self._numbers = RawArray("d", 3 * runs)

    @contextmanager
    def watching(self, run: int, recorder: StoppableRecorder) -> Iterator[None]:
        """Note how far `recorder` is while the body runs, and at its end."""
        try:
            with _repeated(lambda: self._note(run, recorder)):
                yield
        finally:
            self._note(run, recorder)

    def _note(self, run: int, recorder: StoppableRecorder) -> None:
        self._numbers[3 * run : 3 * run + 3] = [
            float(recorder.requests),
            float(recorder.left_count),
            recorder.time,
        ]

    def runs_done(self, over: Sequence[object]) -> str:
        """How many runs there are, those that were kept included; `over` are the new ones."""
        return f"{self.kept + len(over)}/{self.kept + self.runs} runs"

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


class TextOf(ProgressColumn):
    """What a function says of the task."""

    def __init__(self, text: Callable[[Task], str], style: str = "") -> None:
        super().__init__()
        self.text, self.style = text, style

    def render(self, task: Task) -> Text:
        return Text(self.text(task), style=self.style)


def words_of(board: Board, spent: float) -> str:
    """How far the runs are after `spent` seconds."""
    parts = [f"{board.done:,}/{board.requests:,} requests"] if board.requests else []
    parts.append(f"{clock(board.time)} {'served' if board.measured else 'simulated'}")
    if board.share > _SURE:
        parts.append(f"{clock(spent * (1 - board.share) / board.share)} left")
    return ", ".join(parts)


class _Bar(BarColumn):
    def __init__(self, board: Board) -> None:
        super().__init__(bar_width=16)
        self.board = board

    def render(self, task: Task) -> ProgressBar:
        board = self.board
        done = board.kept + board.share * board.runs
        task.completed = done / (board.kept + board.runs) * (task.total or 1)
        return super().render(task)


def on_terminal() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr.isatty()


def in_notebook() -> bool:
    """Whether a notebook shows what is printed."""
    return type(sys.stdout).__module__.startswith("ipykernel.")


def preparing(jobs: Sequence[Job]) -> Iterator[Job]:
    """Each job in turn; a terminal shows which, since its traces may take long to read."""
    if not on_terminal() or inside_a_worker():
        yield from jobs
        return
    with Console(stderr=True).status("") as status:
        for number, job in enumerate(jobs, 1):
            status.update(Text(f"preparing {number}/{len(jobs)} arms: {job.arm}"))
            yield job


@contextmanager
def bar(board: Board | None, over: Sequence[object]) -> Iterator[None]:
    """Show a bar while the body runs; `over` is the list to which it appends what is done."""
    if board is None:
        yield
        return
    if not on_terminal():
        with _line(board, over):
            yield
        return
    columns = (
        TextOf(lambda _: board.runs_done(over)),
        _Bar(board),
        TextOf(lambda task: words_of(board, task.elapsed or 0.0), "dim"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        progress.add_task("runs", total=1.0)
        yield


@contextmanager
def _line(board: Board, over: Sequence[object]) -> Iterator[None]:
    """A bar for a notebook, which moves no cursor: a line that is written over itself."""
    since = monotonic()

    def write(text: str) -> None:
        print(f"\r{text:<{_WIDTH}}", end="", flush=True)

    def write_state() -> None:
        progress = words_of(board, monotonic() - since)
        write(f"{board.runs_done(over)}, {progress}")

    try:
        with _repeated(write_state):
            yield
    finally:
        if monotonic() - since > _PERIOD:  # else nothing was written
            write("")
            print("\r", end="", flush=True)


@contextmanager
def _repeated(call: Callable[[], None]) -> Iterator[None]:
    """Make a call every `_PERIOD` seconds while the body runs."""
    over = threading.Event()

    def keep_calling() -> None:
        while not over.wait(_PERIOD):
            call()

    thread = threading.Thread(target=keep_calling, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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
