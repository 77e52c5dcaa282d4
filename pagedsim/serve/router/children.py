"""A fleet's replicas as servers of their own: processes on loopback, started anew if they die."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.serve.api.errors import brief

log = logging.getLogger(__name__)

PAUSE = 1.0
"""Seconds until a replica that has died is started anew; twice as many each time that it dies."""
MOST = 5
"""Times in a row that a replica is started anew before it is given up."""
STEADY = 60.0
"""Seconds after which a replica that lives has ended such a row."""
_ADDRESS = " serves at "
_REFUSED = "refused: "


class Child:
    """A server in a process of its own."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, dict(config)
        self.url = self._said = ""
        self.tries, self._due = 0, 0.0
        self.lost = False
        """Whether it was started anew too often."""
        self.start()

    def start(self) -> None:
        """Start it; it listens some time later, on the port that it had before."""
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.config, other), daemon=True)
        self.process.start()
        other.close()
        self._begun = time.monotonic()

    def wait(self) -> str:
        """Its address, once it listens; raises ConfigError for what it refuses."""
        try:
            while not self.url:
                self._said = self.pipe.recv()
                if self._said.startswith(_REFUSED):
                    raise ConfigError(self._said.removeprefix(_REFUSED))
                if _ADDRESS in self._said:
                    self.url = self._said.rpartition(_ADDRESS)[2]
                    self.config["port"] = int(self.url.rpartition(":")[2])
        except EOFError as error:
            raise PagedsimError(f"{self.name} ended before it listened{self._how()}") from error
        return self.url

    def tend(self) -> None:
        """Start it anew some time after it died, unless that was too often."""
        now = time.monotonic()
        if self.process.is_alive():
            if now - self._begun > STEADY:
                self.tries = 0
        elif self._due:
            if now >= self._due:
                self._due = 0.0
                self.start()
        elif not self.lost:
            if self.tries < MOST:
                wait = PAUSE * 2**self.tries
                self.tries, self._due = self.tries + 1, now + wait
                then = f"in {wait:g} s it is started anew ({self.tries} of {MOST})"
            else:
                self.lost, then = True, f"started anew {MOST} times, it is given up"
            log.warning("%s has died%s; %s", self.name, self._how(), then)

    def _how(self) -> str:
        """How it ended, and the last that it said."""
        self.process.join(5)
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                self._said = self.pipe.recv()
        code = self.process.exitcode or 0
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f" ({how}; it said last: {self._said or 'nothing'})"


class Children:
    """The servers of a fleet, which end with this process."""

    def __init__(self, configs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Start them all, by name; each is to be waited for."""
        self.children = [Child(*config) for config in configs]
        self._ending = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="replicas", daemon=True)

    def __enter__(self) -> Children:
        with ExitStack() as stack:
            stack.callback(self._end)
            for child in self.children:
                child.wait()
            self._watcher.start()
            stack.pop_all()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Raises PagedsimError if none of them is left."""
        self._end()
        if kind is None and all(child.lost for child in self.children):
            raise PagedsimError("no replica is left: each died again and again; see above")

    def _end(self) -> None:
        self._ending.set()
        for child in self.children:
            child.process.terminate()
        for child in self.children:
            child.process.join(5)
            child.process.kill()

    def _watch(self) -> None:
        """Start each that dies anew; end this process where none is left."""
        while not self._ending.wait(PAUSE / 4):
            for child in self.children:
                child.tend()
            if all(child.lost for child in self.children):
                return os.kill(os.getpid(), signal.SIGTERM)


def _serve(config: Mapping[str, Any], pipe: Connection) -> None:
    """Listen in this process until the pipe closes, or a signal comes."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C is the router's, which ends this process when it has drained
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()

    def say(text: str) -> None:
        with suppress(OSError):  # nobody listens any more
            pipe.send(text)

    try:
        from pagedsim.serve.listen import listen

        listen(config, say)
    except PagedsimError as error:
        say(f"{_REFUSED}{error}")
        sys.exit(1)
    except Exception as error:
        say(brief(f"{type(error).__name__}: {error}"))
        raise


def _end_with(pipe: Connection) -> None:
    """End this process with its parent, which sends nothing: what comes is the end of the pipe."""
    wait([pipe])
    os.kill(os.getpid(), signal.SIGTERM)
