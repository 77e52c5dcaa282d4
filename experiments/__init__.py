"""Studies: one kind of question a module, such as comparing policies or sweeping a load."""
