"""Runs a command of pagedsim with a sampler of its stack, importing as little as it can.

    python -m pagedsim.experiments.benchmarks.stack_sampler FILE SECONDS WORDS...

The stack is written to FILE at this interval (0: never); the last line of output is the processor
time.
"""

from __future__ import annotations

import faulthandler
import runpy
import signal
import sys
from time import process_time

if __name__ == "__main__":
    _, path, interval, *words = sys.argv
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
