"""`python -m pagedsim serve` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Child:
    """A server that listens."""

    url: str
    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)
    """Lines it has written to stderr."""

    def end(self) -> int:
        """Terminate it and wait; returns its exit code."""
        self.process.terminate()
        assert self.process.stderr is not None
        self.said += self.process.stderr
        return self.process.wait(timeout=60)


@contextmanager
def listening(*words: str, core: int | None = None) -> Iterator[Child]:
    """`python -m pagedsim serve` with these words, on a port that is free unless they say.

    It is gone when the block ends. On one core alone, where that is asked; exits with what it said
    if it does not come to listen.
    """
    command = [sys.executable, "-m", "pagedsim", "serve", "port=0", *words]
    bound = None if core is None else partial(bind, {core})
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=bound
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if " serves at http" in line:
                yield Child(line.split()[-1], process, said)
                return
        raise SystemExit("".join(said))
    finally:
        process.kill()
        process.wait()


def bind(cores: set[int]) -> None:
    """Have this process run on these cores alone, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
