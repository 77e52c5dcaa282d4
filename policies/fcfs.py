"""First come, first served."""

from pagedsim.core import Policy


class FCFS(Policy):
    """In order of arrival; who was preempted goes back to the front (vLLM's default)."""
