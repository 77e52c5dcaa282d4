"""Studies that hold the simulator against real servers."""
