"""What vidur.py has Vidur's own interpreter run, in Vidur's folder: a simulation, and its times.

The words are those of `python -m vidur.main`, which does the same but for the times.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module

if __name__ == "__main__":
    sys.path[0] = ""  # where it is started, and not where this file lies
    config = import_module("vidur.config").SimulationConfig.create_from_cli_args()
    import_module("vidur.utils.random").set_seeds(config.seed)
    simulator = import_module("vidur.simulator").Simulator(config)
    begun = time.process_time()
    simulator.run()
    took = time.process_time() - begun
    batches = import_module("vidur.entities").Batch._id + 1
    print(f"loop {took} batches {batches} simulated {simulator._time}", flush=True)
