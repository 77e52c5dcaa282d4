"""One part, in a process that ends with this one whatever happens."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from experiments.benchmarks.gpu.parts import FOLDER, Part
from experiments.benchmarks.harness import ROOT

TAIL, WIDTH = 30, 300
"""Lines that are kept of what a part says that does not get done, and their characters."""
TICK = 15.0
"""Seconds between two looks at what a part has written."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class Outcome(NamedTuple):
    """How a part went."""

    code: int | None
    """Its exit code; None: it was stopped."""
    seconds: float
    said: list[str]


def carried_out(part: Part, place: Path, seconds: float, meanwhile: Callable[[], Any]) -> Outcome:
    """Run a part for so long at most; `meanwhile` is called every now and then."""
    words = [word.replace(FOLDER, str(place)) for word in part.words]
    begun = time.monotonic()
    with TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_end_with_parent,
        )
        try:
            code = _ended(child, begun + seconds, meanwhile)
        finally:  # a Ctrl-C, too; and whoever it has started
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            lines = _shown(said)
    return Outcome(code, round(time.monotonic() - begun, 1), lines)


def _ended(child: subprocess.Popen[bytes], end: float, meanwhile: Callable[[], Any]) -> int | None:
    """Its exit code; None if it has not ended in time."""
    while (left := end - time.monotonic()) > 0:
        try:
            return child.wait(min(TICK, left))
        except subprocess.TimeoutExpired:
            meanwhile()
    return None


def _shown(said: IO[bytes]) -> list[str]:
    """Print what it said; the last lines of it."""
    said.seek(0)
    text = said.read().decode(errors="replace").replace(f"{ROOT}/", "")
    print(text, flush=True)
    return [line[:WIDTH] for line in text.splitlines()[-TAIL:]]


def _end_with_parent() -> None:
    """Linux kills it if this process is killed: nobody else measures beside a leftover."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
