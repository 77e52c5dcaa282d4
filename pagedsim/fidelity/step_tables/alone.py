"""Requests of a log that had their server to themselves, as rows: a prompt and its tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagedsim.fidelity.external_log import Log
from pagedsim.fidelity.step_tables.cell import Cell
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape

COLD = 2
"""Requests at the beginning of a log that may still have waited for the server to warm up."""


def alone(log: Log, table: str, model: ModelShape, hardware: Hardware, stack: str) -> list[Cell]:
    """Rows of requests that were alone from arrival to finish.

    What lies between their first and their last token are steps of one sequence each.
    """
    return [
        Cell(
            *(table, log.places[row], model, hardware, 1, stack),
            way="steps",
            prompt=int(log.prompt[row]),
            output=int(log.output[row]),
            at_once=1,
            measured={
                "ttft": float(log.latencies.ttft[row]),
                "token": float(log.latencies.tpot[row]),
            },
        )
        for row in _alone(log)
    ]


def _alone(log: Log) -> Iterator[int]:
    ends = log.arrived + log.latencies.e2e
    before = np.concatenate([[0.0], np.maximum.accumulate(ends)[:-1]])
    after = np.concatenate([log.arrived[1:], [np.inf]])
    for row in np.flatnonzero((log.arrived >= before) & (ends <= after)).tolist():
        if row >= COLD and log.output[row] > 1:
            yield row
