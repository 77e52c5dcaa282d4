"""Studies: one kind of question a module, such as comparing policies or sweeping a load."""

if __name__ == "experiments":
    raise ImportError("experiments is a package of pagedsim: import pagedsim.experiments")
