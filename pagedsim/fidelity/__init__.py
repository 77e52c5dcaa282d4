"""Accuracy of the simulator: recorded engine runs, step tables, and logs of external servers."""
