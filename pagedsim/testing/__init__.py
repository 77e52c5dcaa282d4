"""Checks of user-defined components, for the tests of their authors.

Each runs random servers or fleets with the component and raises an AssertionError, in one line,
that names the first broken promise and the case; it returns None if there is none.

>>> from pagedsim.core import Unified
>>> check_batching(Unified, cases=3)
"""

from pagedsim.testing.cost import check_cost_model
from pagedsim.testing.fleets import check_autoscaler, check_router
from pagedsim.testing.schedulers import check_batching, check_memory, check_policy

__all__ = [
    "check_autoscaler",
    "check_batching",
    "check_cost_model",
    "check_memory",
    "check_policy",
    "check_router",
]
