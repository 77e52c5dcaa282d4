"""A router of the simulator before servers over HTTP."""
