"""The process in which front_door.py has one command run, with a clock for each of its parts.

    python -m experiments.benchmarks.front_door_child FOLDER WORDS...

FOLDER gets a file from each process that ran something: its processor time by part, as JSON. That
of the command itself has under `PROCESSES` what its processes took in all, theirs included.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path
from threading import current_thread, main_thread
from time import process_time
from typing import Any

PROCESSES, OTHER = "processes", "the rest"
PARTS = {
    "composing": ("hydra._internal.hydra:Hydra.compose_config",),
    "workloads and servers": ("pagedsim.run.job:build",),
    "simulating": ("pagedsim.run.simulation:Simulation.run",),
    "tables and summaries": ("pagedsim.run.job:_finish",),
    "plots": ("pagedsim.report.pictures:drawn",),
    "report and timeline": ("pagedsim.run.publish:write", "pagedsim.run.publish:write_timeline"),
    "Weights & Biases": ("pagedsim.run.publish:track",),
}
"""What is looked at of a study, by the functions that do it."""


class Clocks:
    """Processor time of this process, by what its main thread is at."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._at, self._since = [OTHER], 0.0
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self.seconds.clear()
        self._since = process_time()

    def _note(self) -> None:
        now = process_time()
        self.seconds[self._at[-1]] += now - self._since
        self._since = now

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same function; while it runs, time is that part's."""

        @wraps(function)
        def run(*words: Any, **settings: Any) -> Any:
            if current_thread() is not main_thread():
                return function(*words, **settings)
            self._note()
            self._at.append(part)
            try:
                return function(*words, **settings)
            finally:
                self._note()
                self._at.pop()

        return run

    def write(self, folder: Path, **more: float) -> None:
        """Leave what there is by now."""
        self._note()
        text = json.dumps({**self.seconds, **more})
        (folder / f"{os.getpid()}.json").write_text(text, encoding="utf-8")


def watch(clocks: Clocks, folder: Path) -> None:
    """Put the clocks around the functions of `PARTS`, imports, and what workers do."""
    for loader in (SourceFileLoader, ExtensionFileLoader):
        loader.exec_module = clocks.timed(loader.exec_module, "imports")  # type: ignore[method-assign]
    for part, places in PARTS.items():
        for place in places:
            _replace(place, partial(clocks.timed, part=part))

    def leaving(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def work(*words: Any) -> Any:
            try:
                return function(*words)
            finally:
                clocks.write(folder)

        return work

    _replace("pagedsim.run.pool:_work", leaving)


def _replace(place: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    setattr(owner, name, by(getattr(owner, name)))


def run(folder: Path, words: Sequence[str]) -> None:
    """The command, in the folder where this process is."""
    clocks = Clocks()

    def over() -> None:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        clocks.write(folder, **{PROCESSES: used.ru_utime + used.ru_stime})

    atexit.register(over)  # the first, so it is called last: W&B's service has ended by then
    watch(clocks, folder)
    sys.argv = ["pagedsim", *words]
    runpy.run_module("pagedsim", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
