"""How evenly the replicas of a fleet were loaded. These stand among the metrics of
`definitions.py`, and are explained there."""

from __future__ import annotations

import numpy as np

from pagedsim.metrics.metric import LESS, Metrics
from pagedsim.metrics.tables import RunTables

BALANCE = Metrics()


@BALANCE.whole("Load imbalance", "share", LESS)
def load_imbalance(run: RunTables) -> float | None:
    """Tokens that the steps of the busiest replica computed, of prompts and answers, as a share of
    the mean over all replicas of its role: 100 % is even. Of several roles it is the largest."""
    if run.lanes is None:
        return None
    return float(np.fmax.reduce(run.lanes.load))


@BALANCE.whole("Imbalance over time", "share", LESS)
def imbalance_over_time(run: RunTables) -> float | None:
    """How unevenly requests, waiting or served, lie on the replicas of a role: the standard
    deviation of their numbers as a share of the mean, over all moments, each counted by the
    requests that are there then. Replicas that differ in speed are not even at their best."""
    return None if run.lanes is None else run.lanes.imbalance()
