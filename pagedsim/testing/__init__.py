"""Checks of user-defined components, for the tests of their authors.

Each runs random servers or fleets with the component and raises an AssertionError, in one line,
that names the first broken promise and the case; it returns None if there is none.

>>> from pagedsim.core import Unified
>>> check_batching(Unified, cases=3)
"""

from pagedsim.testing.autoscaler import check_autoscaler
from pagedsim.testing.batching import check_batching
from pagedsim.testing.cost import check_cost_model
from pagedsim.testing.memory import check_memory
from pagedsim.testing.policy import check_policy
from pagedsim.testing.router import check_router

__all__ = [
    "check_autoscaler",
    "check_batching",
    "check_cost_model",
    "check_memory",
    "check_policy",
    "check_router",
]
