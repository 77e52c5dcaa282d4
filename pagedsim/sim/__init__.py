"""The simulator: a SimPy process asks the scheduler for plans and a cost model for their time."""
