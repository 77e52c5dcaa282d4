"""Programs that benchmarks start in processes of their own, which import as little as they can.

    python -m experiments.benchmarks.children NAME WORDS...

`stacks FILE SECONDS WORDS...` runs a command of pagedsim and writes its stack to FILE at this
interval (0: never); its last line of output is its processor time. `server` runs another engine;
engines import the main module again in their processes.
"""

from __future__ import annotations

import faulthandler
import runpy
import signal
import sys
from importlib import import_module
from pathlib import Path
from time import process_time


def stacks(path: str, interval: str, *words: str) -> None:
    """Run a command of pagedsim with a sampler of its stack."""
    with open(path, "wb") as file:
        # A handler in C runs at the moment of the signal. One in Python runs where the interpreter
        # next checks for signals, so the time before a call would count for the call.
        faulthandler.register(signal.SIGALRM, file=file, all_threads=False)
        signal.setitimer(signal.ITIMER_REAL, float(interval), float(interval))
        try:
            sys.argv = ["pagedsim", *words]
            runpy.run_module("pagedsim", run_name="__main__", alter_sys=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(f"\n{process_time()}")


def server(name: str, folder: str, dtype: str, rounds: str) -> None:
    """Serve with another engine."""
    serve = import_module("experiments.benchmarks.servers").serve
    serve(name, Path(folder), dtype, int(rounds))


if __name__ == "__main__":
    for program in (stacks, server):
        if program.__name__ == sys.argv[1]:
            program(*sys.argv[2:])
