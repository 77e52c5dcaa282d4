"""Studies of policies, memory and load."""
