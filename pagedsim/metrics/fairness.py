"""How the clients of a run fared: the service of each, how even it was, and what readers made of
it. These stand among the metrics of `definitions.py`, and are explained there."""

from __future__ import annotations

import numpy as np

from pagedsim.metrics.metric import LESS, MORE, NEITHER, Metrics
from pagedsim.metrics.service import jain
from pagedsim.metrics.tables import NAN, RunTables, Served

FAIRNESS = Metrics()


@FAIRNESS.tally("Service", "count", NEITHER)
def service(served: Served) -> float:
    """What requests got, finished or not: 1 for each token of a prompt whose first token came,
    and 2 for each token generated."""
    return float(served.run.service[served.mask].sum())


@FAIRNESS.tally("QoE", "share", MORE)
def qoe(served: Served) -> float:
    """Quality of experience (Andes): of the time that a reader spent until each token, the share
    that was no delay against an answer that begins after qoe.ttft and comes at
    qoe.tokens_per_s; mean over finished requests."""
    values = served.run.qoe[served.finished]
    return float(np.mean(values)) if len(values) else NAN


@FAIRNESS.whole("Service gap", "count", LESS)
def service_gap(run: RunTables) -> float | None:
    """The largest difference between the service that two clients got within any time in which
    both had requests in the queue that had not been scheduled; of more than 32 clients, those
    farthest from the mean are compared."""
    return run.service_over_time.gap_while_waiting() if len(run.clients) > 1 else None


@FAIRNESS.whole("Service Jain", "share", MORE)
def service_jain(run: RunTables) -> float | None:
    """Jain's index of the clients' service a second while they had requests in the queue that had
    not been scheduled: 100 % where all are alike; who never had any is left out."""
    return jain(run.service_over_time.rates_while_waiting()) if len(run.clients) > 1 else None
