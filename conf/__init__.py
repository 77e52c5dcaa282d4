"""The Hydra configuration: one folder a group, named after the module that it builds."""

if __name__ == "conf":
    raise ImportError("conf is a package of pagedsim: import pagedsim.conf")
