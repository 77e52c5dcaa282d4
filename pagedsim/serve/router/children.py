"""A fleet's replicas as servers of their own: processes on loopback, started anew if they die."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from pagedsim.core import ConfigError, PagedsimError

log = logging.getLogger(__name__)

PAUSE = 1.0
"""Seconds until a replica that has died is started anew."""
_ADDRESS = " serves at "
_REFUSED = "refused: "


class Child:
    """A server in a process of its own."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, dict(config)
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start it; it listens some time later, on the port that it had before."""
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.config, other), daemon=True)
        self.process.start()
        other.close()

    def wait(self) -> str:
        """Its address, once it listens; raises ConfigError for what it refuses."""
        try:
            while not self.url:
                line = self.pipe.recv()
                if line.startswith(_REFUSED):
                    raise ConfigError(line.removeprefix(_REFUSED))
                if _ADDRESS in line:
                    self.url = line.rpartition(_ADDRESS)[2]
                    self.config["port"] = int(self.url.rpartition(":")[2])
        except EOFError as error:
            raise PagedsimError(f"{self.name} ended before it listened") from error
        return self.url


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

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        self._ending.set()
        for child in self.children:
            child.process.terminate()
        for child in self.children:
            child.process.join(5)
            child.process.kill()

    def _watch(self) -> None:
        """Start each that dies anew."""
        while not self._ending.wait(PAUSE):
            dead = [child for child in self.children if not child.process.is_alive()]
            for child in dead:
                log.warning("%s has died (%s)", child.name, child.process.exitcode)
                child.start()


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


def _end_with(pipe: Connection) -> None:
    """End this process with its parent, which sends nothing: what comes is the end of the pipe."""
    wait([pipe])
    os.kill(os.getpid(), signal.SIGTERM)
