"""The working set over time: how much memory would keep whatever was used lately.

It is the number of distinct tokens that requests have touched within the last `WINDOW` seconds. A
request touches its prompt and its answer from when it is first scheduled until it ends; tokens of
two requests are the same if all before them are the same, too, as for a prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pagedsim.workload.tokens import Prompts

WINDOW = 60.0
"""Seconds."""

Floats = NDArray[np.float64]
Steps = list[tuple[int, float]]
"""How long a run of tokens stays in the working set: up to which token, and until when; from one to
the next there are more tokens, and they stay for a shorter time."""


def working_set(
    prompts: Prompts, rows: NDArray[np.int64], begin: Floats, end: Floats, output: NDArray[np.int32]
) -> Floats:
    """The working set when each of these rows of a workload begins, itself included; NaN for one
    that does not. They have answers of so many tokens."""
    scheduled = np.flatnonzero(~np.isnan(begin))
    order = scheduled[np.argsort(begin[scheduled], kind="stable")]
    runs: dict[tuple[int, int, int], tuple[int, Steps]] = {}
    times, changes = list[float](), list[int]()
    for row, start, stop, tokens in zip(
        rows[order].tolist(),
        begin[order].tolist(),
        (end[order] + WINDOW).tolist(),
        output[order].tolist(),
        strict=True,
    ):
        above, before = 0, 0
        for stream, length in _runs(prompts, row, tokens):
            number, steps = runs.setdefault((above, before, stream), (len(runs) + 1, []))
            for since, count in _touch(steps, length, start, stop):
                times += (since, stop)
                changes += (count, -count)
            above, before = number, length
    result = np.full(len(rows), np.nan)
    at = np.array(times)
    sums = np.cumsum(np.array(changes, np.int64)[np.argsort(at, kind="stable")])
    result[order] = sums[np.searchsorted(np.sort(at), begin[order], side="right") - 1]
    return result


def _runs(prompts: Prompts, row: int, output: int) -> Iterator[tuple[int, int]]:
    """The streams and lengths of a prompt and its answer."""
    yield from prompts[row].runs
    answer = prompts.answer(row)
    yield (-1 - row if answer is None else answer.streams[0]), output


def _touch(steps: Steps, length: int, start: float, stop: float) -> Iterator[tuple[float, int]]:
    """Touch the first tokens of a run; since when how many of them stay longer than they would."""
    later = [step for step in steps if step[1] >= stop]
    done = later[-1][0] if later else 0
    longer = [step for step in steps[len(later) :] if step[0] > length]
    for upto, until in steps[len(later) :]:
        if (reached := min(upto, length)) > done:
            yield max(until, start), reached - done
            done = reached
    if length > done:
        yield start, length - done
    if not later or later[-1][0] < length:
        later.append((length, stop))
    steps[:] = later + longer
