"""The simulator: a SimPy process runs the scheduler's plans with step times of a cost model."""
