"""Preemptions: start, end and cause of each, and how its KV cache is restored."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np
import pyarrow as pa

from pagedsim.core.plan import PreemptionCause
from pagedsim.core.request import RequestId
from pagedsim.metrics.steps import REPLICA


class Absence:
    """A preemption of one request, until it decodes again."""

    __slots__ = ("back_at", "by", "decoding_at", "how", "request", "time", "wanted", "why")

    def __init__(self, cause: PreemptionCause, time: float) -> None:
        self.time = time
        self.request: RequestId = cause.request.id
        self.by: RequestId | None = None if cause.by is None else cause.by.id
        self.why = "displaced" if cause.displaced else "memory"
        self.wanted = cause.wanted
        self.how = "swap" if cause.swapped else "recompute"
        self.back_at = nan
        """Start of the step that readmits it; NaN if none does."""
        self.decoding_at = nan
        """When its KV cache is recomputed or swapped in; NaN if never."""


def preemptions_table(lanes: Sequence[Sequence[Absence]]) -> pa.Table:
    """One row per preemption, by time; with a replica column if there are several `lanes`."""
    rows = [one for lane in lanes for one in lane]
    times = np.array([one.time for one in rows], dtype=np.float64)
    order = np.argsort(times, kind="stable")
    rows = [rows[index] for index in order.tolist()]
    columns = {
        "time": times[order],
        "request": pa.array([one.request for one in rows]),
        "by": pa.array([one.by for one in rows]),
        "why": pa.array([one.why for one in rows], pa.string()),
        "wanted": pa.array([one.wanted for one in rows], pa.string()),
        "how": pa.array([one.how for one in rows], pa.string()),
        "back_at": np.array([one.back_at for one in rows], dtype=np.float64),
        "decoding_at": np.array([one.decoding_at for one in rows], dtype=np.float64),
    }
    if len(lanes) > 1:
        which = np.repeat(np.arange(len(lanes), dtype=np.int32), [len(lane) for lane in lanes])
        columns[REPLICA] = which[order]
    return pa.table(columns)
