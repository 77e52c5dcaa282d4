"""The process in which layers.py has one command of pagedsim run, and its stack written down.

    python -m experiments.benchmarks.layers_child FILE SECONDS WORDS...

FILE gets the stacks, SECONDS lie between two of them (0: none), WORDS are those of the command. The
last line printed is the processor time that all of it took.
"""

from __future__ import annotations

import faulthandler
import runpy
import signal
import sys
import time

if __name__ == "__main__":
    path, between, *words = sys.argv[1:]
    with open(path, "wb") as file:
        # A handler in C, at work in the moment of the signal. One in Python runs where the
        # interpreter next looks for signals, so calls would get what is spent before them.
        faulthandler.register(signal.SIGALRM, file=file, all_threads=False)
        signal.setitimer(signal.ITIMER_REAL, float(between), float(between))
        sys.argv = ["pagedsim", *words]
        try:
            runpy.run_module("pagedsim", run_name="__main__", alter_sys=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(f"\n{time.process_time()}")
