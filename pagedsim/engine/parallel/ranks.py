"""Rank 0's handle of the other ranks: processes that execute the same commands.

Commands, replies and errors go over one socket per rank. A listener thread detects failed ranks:
steps have no replies, so a missing rank would otherwise show only as an all-reduce that hangs.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import TCPStore

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.engine.parallel.group import RankGroup, RankLost
from pagedsim.engine.runtime import Threads

HOST = "127.0.0.1"
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pagedsim.engine.parallel.worker import main; main()"
)
"""Code of a rank: a new interpreter with this one's module path. It does not import the script that
is running here, which would make an engine again."""

EXIT_LOST = 3
"""Exit code of a rank that lost another one, which is the one to report."""
EXIT_S = 5.0
"""For a process to end by itself, and for the report of its end."""
CONNECT_TIMEOUT = timedelta(minutes=1)
"""For all ranks to connect, once they have started."""


class RankError(PagedsimError, RuntimeError):
    """A rank has failed; the engine cannot compute any more."""


class Failure(NamedTuple):
    """A rank's own error."""

    ours: bool
    """Whether it is a PagedsimError, whose text needs no error class."""
    text: str


@dataclass(eq=False)
class RankProcess:
    """Another rank."""

    rank: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    connection: Connection
    """Over the same socket; this process writes to it, the thread that listens reads."""
    replies: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def end(self) -> str | None:
        """How its process ended; None if it lost another rank."""
        try:
            code = self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "does not answer"
        if code == EXIT_LOST:
            return None
        if code < 0:
            with suppress(ValueError):
                return f"died of {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class RankMonitor:
    """The state of the ranks, as the listener thread observes it."""

    def __init__(self) -> None:
        self.members: list[RankProcess] = []
        self.group: RankGroup | None = None
        """Aborted when a rank is gone, since this process may wait in it."""
        self.over = threading.Event()
        self.error: PagedsimError | None = None
        self.threads: Threads | None = None
        """Those of this process, where the ranks share its cores."""

    def listen(self) -> None:
        """Receive replies and failures until all ranks are gone."""
        alive: dict[Any, RankProcess] = {member.connection: member for member in self.members}
        left: RankProcess | None = None  # lost its peers; another rank's failure is expected
        while alive:
            ready: list[Any] = wait(alive, timeout=None if left is None else EXIT_S)
            if left is not None and not ready:
                self.end(self._gone(left, "lost the others"))
                left = None
            for connection in ready:
                member = alive[connection]
                try:
                    reply = connection.recv()
                except (EOFError, OSError):
                    del alive[connection]
                    if (how := member.end()) is None:
                        left = member
                    else:
                        self.end(self._gone(member, how))
                    continue
                if isinstance(reply, Failure):
                    kind = ConfigError if reply.ours else RankError
                    self.end(kind(f"rank {member.rank}: {reply.text}"))
                else:
                    member.replies.put(reply)
        if left is not None:
            self.end(self._gone(left, "lost the others"))

    def _gone(self, member: RankProcess, how: str) -> RankError:
        return RankError(f"rank {member.rank} of {len(self.members) + 1} {how}")

    def end(self, error: PagedsimError) -> None:
        """Record the first error and wake all waiters."""
        if self.over.is_set():
            return
        self.error = error
        self.over.set()
        for member in self.members:
            member.replies.put(None)
        if self.group is not None:
            self.group.abort()


class Ranks:
    """All ranks but this one, 0.

    They end when this object is closed or deleted, and with this process, however that ends.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Start them; `device` is that of rank 0."""
        self.size, self.device = size, device
        self._monitor = monitor = RankMonitor()
        self._close = weakref.finalize(self, _end, monitor, os.getpid())
        try:
            monitor.members = [_started(rank) for rank in range(1, size)]
            threading.Thread(target=monitor.listen, name="ranks", daemon=True).start()
            if device.type == "cpu":
                monitor.threads = Threads()
                monitor.threads.take(max(torch.get_num_threads() // size, 1))
            with self.together("start", device.type, torch.get_num_threads()):
                store = TCPStore(HOST, 0, size, True, CONNECT_TIMEOUT, wait_for_workers=False)
            self.replies()
            with self.together("join", size, store.port):
                self.group = monitor.group = RankGroup(store, 0, size, device)
                self.group.meet(device)
            self.replies()
        except BaseException:
            self.close()
            raise

    @property
    def gone(self) -> bool:
        """Whether a rank has failed or all are closed."""
        return self._monitor.error is not None

    def check(self) -> None:
        """Raise the reason if the ranks are gone."""
        if self._monitor.error is not None:
            raise self._monitor.error

    @contextmanager
    def together(self, name: str, *values: Any, **settings: Any) -> Iterator[None]:
        """Have the other ranks execute `name` (`worker.py`) while this one executes the block.

        If a rank fails, the ranks are out of step and all are closed; the error is raised here and
        by all later calls.
        """
        self.check()
        try:
            message = pickle.dumps((name, values, settings), pickle.HIGHEST_PROTOCOL)
            for member in self._monitor.members:
                member.connection.send_bytes(message)
            yield
            self.check()
        except BaseException as error:
            raise self._failed(error) from error

    def replies(self) -> list[Any]:
        """The other ranks' replies to the last command, in their order."""
        replies = [member.replies.get() for member in self._monitor.members]
        if self._monitor.error is not None:
            raise self._failed(self._monitor.error)
        return [reply for (reply,) in replies]

    def close(self) -> None:
        """End the processes."""
        self._monitor.end(RankError("the engine is closed"))
        self._close()

    def _failed(self, error: BaseException) -> BaseException:
        if isinstance(error, (RankLost, OSError)):  # wait for its reason
            self._monitor.over.wait(EXIT_S)
        if self._monitor.error is None:
            kept = isinstance(error, PagedsimError)
            text = str(error) if kept else f"{type(error).__name__}: {error}".splitlines()[0]
            self._monitor.end(RankError(f"rank 0: {text}"))
            reason = error if kept or not isinstance(error, Exception) else self._monitor.error
        else:
            reason = self._monitor.error
        for member in self._monitor.members:
            member.process.kill()  # it may wait for a rank that is gone
        self._close()
        assert reason is not None
        return reason


def _started(rank: int) -> RankProcess:
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path), str(rank), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # SIGINT is for rank 0 alone
        )
    return RankProcess(rank, process, mine, Connection(os.dup(mine.fileno())))


def _end(monitor: RankMonitor, owner: int) -> None:
    """End the processes by closing their sockets."""
    if os.getpid() != owner:  # a fork does not own them
        return
    monitor.end(RankError("the engine is closed"))
    for member in monitor.members:
        with suppress(OSError):
            member.socket.shutdown(socket.SHUT_RDWR)
    for member in monitor.members:
        try:
            member.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()
        member.socket.close()
    if monitor.threads is not None:
        monitor.threads.give_back()
