"""Scheduling policies, one a file, each built from the hooks of pagedsim.core.policy."""
