"""The longest wait for a token that each request had once it had begun."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Run
from pagedsim.metrics.gap import token_gaps

Floats = NDArray[np.float64]


def longest_gaps(run: Run) -> Floats:
    """Seconds, a request each in the order of their ids; NaN for who did not finish.

    Of one that was preempted more than once, its pauses are taken as equally long, since which
    steps it missed is not recorded.
    """
    steps = run.steps("end", "decode_seqs")
    end, decodes = (np.asarray(steps[name].to_numpy()) for name in steps.column_names)
    ends = end[decodes > 0]
    table = run.requests("first_token", "finished", "output_tokens", "preemptions")
    first, last, tokens, preempted = (
        np.asarray(table[name].to_numpy()) for name in table.column_names
    )
    begin, stop = (np.searchsorted(ends, times, side="right") for times in (first, last))

    def longest(row: int) -> float:
        if np.isnan(last[row]):
            return math.nan
        if tokens[row] < 2:
            return 0.0
        one = slice(row, row + 1)
        there = ends[begin[row] : stop[row]]
        gaps, _ = token_gaps(there, first[one], last[one], tokens[one], preempted[one])
        return float(gaps.max(initial=0.0))

    return np.array([longest(row) for row in range(table.num_rows)])
