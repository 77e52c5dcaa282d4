"""Cost models of step times: roofline from data sheets, the sum of measured kernels, or fitted."""

from pagedsim.core.compiled import own_abc_registry
from pagedsim.sim.cost.base import Breakdown, CostModel, Term, UnmeasuredError
from pagedsim.sim.cost.decodes import Decodes
from pagedsim.sim.cost.fitted import Fitted
from pagedsim.sim.cost.fitting import Sample
from pagedsim.sim.cost.measured import Measured
from pagedsim.sim.cost.roofline import Roofline

__all__ = [
    "Breakdown",
    "CostModel",
    "Decodes",
    "Fitted",
    "Measured",
    "Roofline",
    "Sample",
    "Term",
    "UnmeasuredError",
]

own_abc_registry(CostModel, "step_seconds")
