"""Scheduling policies, one a file, each built from the hooks of pagedsim.core.policy."""

if __name__ == "policies":
    raise ImportError("policies is a package of pagedsim: import pagedsim.policies")
