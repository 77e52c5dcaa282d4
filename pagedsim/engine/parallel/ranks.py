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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.engine.cache import Cache
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.parallel.group import Parted, RankGroup
from pagedsim.engine.runner import Runner
from pagedsim.engine.runtime import uninterrupted
from pagedsim.engine.step_inputs import StepInputs

HOST = "127.0.0.1"
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pagedsim.engine.parallel.worker import main; main()"
)
"""What a rank runs: an interpreter of its own, that finds modules where this one does. It does not
import the script that is running here, which would make an engine again."""

PARTED = 3
"""How a process ends that was left by another rank, which is the one to be named."""
SECONDS = 5.0
"""For a process to end by itself, and for the news of one that did."""
PATIENCE = timedelta(minutes=1)
"""For all to meet, once they are there."""


class RankError(PagedsimError, RuntimeError):
    """A rank has failed; the engine cannot compute any more."""


class Failure(NamedTuple):
    """Why a rank fails, as it says itself."""

    ours: bool
    """Whether its text is a clear line already."""
    text: str


@dataclass(eq=False)
class Member:
    """Another rank."""

    rank: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    connection: Connection
    """Over the same socket; this process writes to it, the thread that listens reads."""
    replies: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def end(self) -> str | None:
        """How its process ended; None if others left it."""
        try:
            code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return "does not answer"
        if code == PARTED:
            return None
        if code < 0:
            with suppress(ValueError):
                return f"died of {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class News:
    """What became of the ranks, as the thread that listens finds out."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.group: RankGroup | None = None
        """In which this process may wait for one that is gone."""
        self.over = threading.Event()
        self.error: PagedsimError | None = None
        self._threads: tuple[int, int] | None = None

    def listen(self) -> None:
        """Until all are gone."""
        there: dict[Any, Member] = {member.connection: member for member in self.members}
        left: Member | None = None  # lost its peers; another rank's failure is expected
        while there:
            ready: list[Any] = wait(there, timeout=None if left is None else SECONDS)
            if left is not None and not ready:
                self.end(self._gone(left, "lost the others"))
                left = None
            for connection in ready:
                member = there[connection]
                try:
                    said = connection.recv()
                except (EOFError, OSError):
                    del there[connection]
                    if (how := member.end()) is None:
                        left = member
                    else:
                        self.end(self._gone(member, how))
                    continue
                if isinstance(said, Failure):
                    kind = ConfigError if said.ours else RankError
                    self.end(kind(f"rank {member.rank}: {said.text}"))
                else:
                    member.replies.put(said)
        if left is not None:
            self.end(self._gone(left, "lost the others"))

    def _gone(self, member: Member, how: str) -> RankError:
        return RankError(f"rank {member.rank} of {len(self.members) + 1} {how}")

    def share_cores(self, size: int) -> None:
        """Have this process use its part of the threads that it had, until the ranks end."""
        threads = torch.get_num_threads()
        self._threads = threads, max(threads // size, 1)
        torch.set_num_threads(self._threads[1])

    def give_cores_back(self) -> None:
        """Restore the thread count, unless it was changed since."""
        if self._threads is not None and torch.get_num_threads() == self._threads[1]:
            torch.set_num_threads(self._threads[0])

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

    They end when this object is closed or not used any more, and with this process, however that
    ends.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Start them; `device` is that of rank 0."""
        self.size, self.device = size, device
        self._news = news = News()
        self._close = weakref.finalize(self, _end, news, os.getpid())
        try:
            news.members = [_started(rank) for rank in range(1, size)]
            threading.Thread(target=news.listen, name="ranks", daemon=True).start()
            if device.type == "cpu":  # they share its cores
                news.share_cores(size)
            with self.together("start", device.type, torch.get_num_threads()):
                store = TCPStore(HOST, 0, size, True, PATIENCE, wait_for_workers=False)
            self.replies()
            with self.together("join", size, store.port):
                self.group = news.group = RankGroup(store, 0, size, device)
                self.group.meet(device)
            self.replies()
        except BaseException:
            self.close()
            raise

    @property
    def gone(self) -> bool:
        """Whether nothing can be computed any more."""
        return self._news.error is not None

    def check(self) -> None:
        """Raise why the ranks are gone, if they are."""
        if self._news.error is not None:
            raise self._news.error

    @contextmanager
    def together(self, name: str, *values: Any, **settings: Any) -> Iterator[None]:
        """Have the others do `name` (see `worker.py`) while this rank does what is inside.

        If that fails here or there, the ranks may be at different places, and all are closed:
        what failed is raised, here and whenever they are asked again.
        """
        self.check()
        try:
            message = pickle.dumps((name, values, settings), pickle.HIGHEST_PROTOCOL)
            for member in self._news.members:
                member.connection.send_bytes(message)
            yield
            self.check()
        except BaseException as error:
            raise self._failed(error) from error

    def replies(self) -> list[Any]:
        """What the others say to what they were last told to do, in their order."""
        found = [member.replies.get() for member in self._news.members]
        if self._news.error is not None:
            raise self._failed(self._news.error)
        return [reply for (reply,) in found]

    def close(self) -> None:
        """End the processes."""
        self._news.end(RankError("the engine is closed"))
        self._close()

    def _failed(self, error: BaseException) -> BaseException:
        if isinstance(error, (Parted, OSError)):  # it is only found out why
            self._news.over.wait(SECONDS)
        if self._news.error is None:
            kept = isinstance(error, PagedsimError)
            text = str(error) if kept else f"{type(error).__name__}: {error}".splitlines()[0]
            self._news.end(RankError(f"rank 0: {text}"))
            found = error if kept or not isinstance(error, Exception) else self._news.error
        else:
            found = self._news.error
        for member in self._news.members:
            member.process.kill()  # it may wait for a rank that will not come
        self._close()
        assert found is not None
        return found


def _started(rank: int) -> Member:
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path), str(rank), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for rank 0, which tells the others
        )
    return Member(rank, process, mine, Connection(os.dup(mine.fileno())))


def _end(news: News, owner: int) -> None:
    """End the processes by closing their sockets."""
    if os.getpid() != owner:  # in a fork they are not its own
        return
    news.end(RankError("the engine is closed"))
    for member in news.members:
        with suppress(OSError):
            member.socket.shutdown(socket.SHUT_RDWR)
    for member in news.members:
        try:
            member.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()
        member.socket.close()
    news.give_cores_back()


class Leader(Runner):
    """The runner of rank 0: every command is also executed by the other ranks."""

    def __init__(
        self,
        ranks: Ranks,
        model: LoadedModel,
        cache: Cache,
        *,
        seqs: int,
        longest: int,
        layout: str = "block",
    ) -> None:
        self._ranks = ranks
        settings = {"seqs": seqs, "longest": longest, "layout": layout}
        with ranks.together("make", cache.shape, len(cache.gpu), len(cache.cpu), **settings):
            super().__init__(model, cache, seqs=seqs, longest=longest, layout=layout)
        ranks.replies()

    def carry_out(self, inputs: StepInputs, picked: torch.Tensor | None = None) -> torch.Tensor:
        with uninterrupted(), self._ranks.together("carry_out", _without_tokens(inputs)):
            return super().carry_out(inputs, picked)

    def rehearse(self, sequences: Sequence[tuple[int, int]]) -> None:
        with self._ranks.together("rehearse", sequences):
            super().rehearse(sequences)

    def warm_up(self, max_tokens: int, graphs: bool) -> None:
        with self._ranks.together("warm_up", max_tokens, graphs):
            super().warm_up(max_tokens, graphs)
        self._ranks.replies()

    def check(self) -> None:
        self._ranks.check()

    def close(self) -> None:
        if not self._ranks.gone:
            with self._ranks.together("drop"):
                pass
            self._ranks.replies()


def _without_tokens(inputs: StepInputs) -> StepInputs:
    """The same for ranks that get the tokens from this one on the device."""
    if (computing := inputs.computing) is None:
        return inputs
    return replace(inputs, computing=computing._replace(ids=np.zeros(0, dtype=np.int64)))
