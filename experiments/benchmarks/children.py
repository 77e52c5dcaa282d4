"""Programs that benchmarks start in processes of their own, which import as little as they can.

    python -m experiments.benchmarks.children NAME WORDS...

`stacks FILE SECONDS WORDS...` runs a command of pagedsim and writes its stack to FILE at this
interval (0: never); its last line of output is its processor time. `clocks FOLDER WORDS...` runs a
command and writes its processor time by part, a JSON file for each process. `generate MODEL TOKENS`
runs `LLM.generate` for each line of its input and prints the rate. `server` runs another engine;
engines import the main module again in their processes. `vidur` is run by Vidur's own interpreter
in Vidur's folder, with the words of `python -m vidur.main`.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import resource
import runpy
import signal
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

# -- stacks of a command ---------------------------------------------------------------------------


def stacks(path: str, interval: str, *words: str) -> None:
    """Run a command of pagedsim with a sampler of its stack."""
    with open(path, "wb") as file:
        # A handler in C runs at the moment of the signal. One in Python runs where the interpreter
        # next checks for signals, so the time before a call would count for the call.
        faulthandler.register(signal.SIGALRM, file=file, all_threads=False)
        signal.setitimer(signal.ITIMER_REAL, float(interval), float(interval))
        try:
            run_pagedsim(words)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(f"\n{process_time()}")


def run_pagedsim(words: Sequence[str]) -> None:
    """`python -m pagedsim` in this process."""
    sys.argv = ["pagedsim", *words]
    runpy.run_module("pagedsim", run_name="__main__", alter_sys=True)


# -- clocks around the parts of a command ----------------------------------------------------------

PROCESSES, OTHER = "processes", "the rest"
PARTS = {
    "composing": ("hydra._internal.hydra:Hydra.compose_config",),
    "workloads and servers": ("pagedsim.run.job:build",),
    "simulating": ("pagedsim.run.simulated:Simulation.run",),
    "tables and summaries": ("pagedsim.run.job:_finish",),
    "plots": ("pagedsim.report.figures:drawn",),
    "report and timeline": ("pagedsim.run.publish:write", "pagedsim.run.publish:write_timeline"),
    "Weights & Biases": ("pagedsim.run.publish:track",),
}
"""Parts of a study and the functions that do them."""
WORKER = "pagedsim.run.pool:_work"
"""What worker processes run."""


class Clocks:
    """Processor time of this process by the part that its main thread is in."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._parts, self._since = [OTHER], 0.0
        os.register_at_fork(after_in_child=self._restart)

    def _restart(self) -> None:
        self.seconds.clear()
        self._since = process_time()

    def _note(self) -> None:
        now = process_time()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same function; its time counts for this part."""

        @wraps(function)
        def run(*words: Any, **settings: Any) -> Any:
            if current_thread() is not main_thread():
                return function(*words, **settings)
            self._note()
            self._parts.append(part)
            try:
                return function(*words, **settings)
            finally:
                self._note()
                self._parts.pop()

        return run

    def write(self, folder: Path, **more: float) -> None:
        """Write the times so far."""
        self._note()
        text = json.dumps({**self.seconds, **more})
        (folder / f"{os.getpid()}.json").write_text(text, encoding="utf-8")


def clocks(name: str, *words: str) -> None:
    """Run a command of pagedsim with clocks around imports, `PARTS` and worker processes.

    The command's own file has, under `PROCESSES`, the time of all its child processes.
    """
    folder, found = Path(name), Clocks()

    def write() -> None:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.write(folder, **{PROCESSES: used.ru_utime + used.ru_stime})

    def writing(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def work(*given: Any) -> Any:
            try:
                return function(*given)
            finally:
                found.write(folder)

        return work

    atexit.register(write)  # registered first, so it runs last: W&B's service has ended by then
    for loader in (SourceFileLoader, ExtensionFileLoader):
        loader.exec_module = found.timed(loader.exec_module, "imports")  # type: ignore[method-assign]
    for part, places in PARTS.items():
        for place in places:
            _wrap(place, partial(found.timed, part=part))
    _wrap(WORKER, writing)
    run_pagedsim(words)


def _wrap(place: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    setattr(owner, name, wrapper(getattr(owner, name)))


# -- engines and simulators ------------------------------------------------------------------------


def generate(model: str, tokens: str) -> None:
    """A rate of `LLM.generate` for each line of the input."""
    again = import_module("experiments.benchmarks.serving").generate_rate(model, int(tokens))
    for _ in sys.stdin:
        print(again(), flush=True)


def server(name: str, folder: str, dtype: str, repeats: str) -> None:
    """Serve with another engine."""
    serve = import_module("experiments.benchmarks.servers").serve
    serve(name, Path(folder), dtype, int(repeats))


def vidur(*words: str) -> None:
    """Simulate with Vidur; the last line of output has the time of the simulation."""
    sys.path[0] = ""  # its own folder instead of the one of this file
    sys.argv = ["vidur", *words]
    config = import_module("vidur.config").SimulationConfig.create_from_cli_args()
    import_module("vidur.utils.random").set_seeds(config.seed)
    simulator = import_module("vidur.simulator").Simulator(config)
    begun = process_time()
    simulator.run()
    took = process_time() - begun
    batches = import_module("vidur.entities").Batch._id + 1
    print(f"loop {took} batches {batches} simulated {simulator._time}", flush=True)


if __name__ == "__main__":
    for program in (stacks, clocks, generate, server, vidur):
        if program.__name__ == sys.argv[1]:
            program(*sys.argv[2:])
