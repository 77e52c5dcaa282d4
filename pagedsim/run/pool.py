"""Runs in processes of their own; Ctrl-C or SIGTERM stops them all and keeps what there is."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from types import FrameType

from pagedsim.run.failure import Failure
from pagedsim.run.job import Interrupted, Job, Outcome, run_job
from pagedsim.run.parts import backend_of
from pagedsim.run.progress import Board, bar, on_terminal
from pagedsim.run.stoppable import StoppableRecorder

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Both ask to stop: a Ctrl-C, and a batch system whose time is up."""

Done = Callable[[Job, Outcome], None]
"""Told of every outcome as it comes."""


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
        if self.recorder is not None and not (self._patient or self.recorder.begun):
            raise _NotBegun  # nothing is there that could be kept, and a model may take long
        if self.recorder is not None:
            self.recorder.stop()

    def run(self, number: int, job: Job, board: Board | None) -> Outcome:
        """One run, unless it has been asked to stop already."""
        self.recorder = recorder = StoppableRecorder()
        if self.asked:
            return Interrupted()
        try:
            with board.watching(number, recorder) if board else nullcontext():
                return run_job(job, recorder)
        except _NotBegun:
            return Interrupted()
        finally:
            self.recorder = None


def run_jobs(jobs: Sequence[Job], processes: int, done: Done) -> bool:
    """Run them all; returns whether that was interrupted.

    One process means this one. Interrupted, the runs under way write what they have.
    """
    shown = jobs and on_terminal() and not inside_a_worker()
    board = Board(len(jobs), backend_of(jobs[0].config).alone) if shown else None
    over: list[Job] = []

    def told(job: Job, outcome: Outcome) -> None:
        done(job, outcome)
        over.append(job)  # last, so that who is stopped in between is told again

    gc.freeze()  # what is imported stays: runs need not look through it, nor processes copy it
    if processes <= 1 or len(jobs) <= 1:
        return _here(jobs, board, over, told)
    return _in_processes(jobs, min(processes, len(jobs)), board, over, told)


def inside_a_worker() -> bool:
    """Whether this process is one of several already."""
    return multiprocessing.parent_process() is not None


def _here(jobs: Sequence[Job], board: Board | None, over: list[Job], done: Done) -> bool:
    stop = StopSignal(patient=False)
    with _handling(stop), bar(board, over):
        for number, job in enumerate(jobs):
            done(job, stop.run(number, job, board))
            if stop.asked:
                return True
    return False


def _in_processes(
    jobs: Sequence[Job], processes: int, board: Board | None, over: list[Job], done: Done
) -> bool:
    # A fork shares what is imported already; elsewhere it is not safe, so processes start anew.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, context, _enter, (board,))
    with _blocked(), _handling(signal.default_int_handler):
        # Processes begin here: before any thread does, and deaf until they know what to do.
        futures = {pool.submit(_work, number, job): job for number, job in enumerate(jobs)}
    with pool, _handling(signal.default_int_handler), bar(board, over):
        try:
            for future in as_completed(futures):
                done(futures[future], _outcome(future))
        except KeyboardInterrupt:
            _stop(futures, over, done)
            return True
    return False


def _stop(futures: dict[Future[Outcome], Job], over: list[Job], done: Done) -> None:
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
                done(futures[future], _outcome(future))
    except KeyboardInterrupt:
        _kill()
        raise


def _outcome(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        _kill()  # those that are left would finish their runs for nobody
        return Failure("a process died, perhaps for want of memory; fewer jobs= take less")


def _kill() -> None:
    for child in multiprocessing.active_children():
        child.kill()


# -- in a worker -----------------------------------------------------------------------------------

_stop_signal = StopSignal(patient=True)
_board: Board | None = None


def _enter(board: Board | None) -> None:
    """A worker begins."""
    global _board
    _board = board
    for number in _SIGNALS:
        signal.signal(number, _stop_signal)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _work(number: int, job: Job) -> Outcome:
    return _stop_signal.run(number, job, _board)


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
