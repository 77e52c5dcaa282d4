"""Stages of requests over time: queued, prefill, decode, and those caused by preemptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isnan
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pagedsim.metrics.arms import Run

REJECTED = "rejected"
WAITS_AGAIN, SWAPPED_OUT, AGAIN = "preempted", "swapped out", "prefill again"
"""Waiting for memory; waiting with swapped-out blocks; recomputing."""

Preemption = Mapping[str, Any]
"""A row of preemptions.parquet."""


class Stage(NamedTuple):
    """A stage of a request, in seconds."""

    name: str
    begin: float
    end: float
    preemption: Preemption | None = None
    """The preemption that caused it, if any."""


class Life(NamedTuple):
    """The stages and preemptions of one request."""

    stages: Sequence[Stage]
    preemptions: Sequence[Preemption]


def lives_of(run: Run, requests: pa.Table) -> list[Life]:
    """The stages of the given rows of a run's requests."""
    preemptions: dict[Any, list[Preemption]] = {}
    for row in run.preemptions():
        preemptions.setdefault(row["request"], []).append(row)
    names, times = _known(run, requests)
    lives = []
    words = (requests[name].to_pylist() for name in ("request", "state"))
    for request, state, *own in zip(*words, *times, strict=True):
        if state == REJECTED:
            lives.append(Life([Stage(REJECTED, own[0], own[-1])], ()))
            continue
        stages = [
            Stage(name, begin, end)
            for name, (begin, end) in zip(names, pairwise(own), strict=True)
            if end > begin
        ]
        # Preemptions before a restart on another replica are dropped.
        mine = [one for one in preemptions.get(request, ()) if one["time"] >= own[1]]
        lives.append(Life(_interrupted(stages, mine, own[-1]), mine))
    return lives


def _known(run: Run, table: pa.Table) -> tuple[list[str], list[list[float]]]:
    """Names of the stages without preemptions, and their start times followed by the end."""
    known = ["arrival", "scheduled" if run.inside else "first_token", "first_token", "finished"]
    names = ["queued", "prefill", "decode"]
    columns = {name: np.asarray(table[name].to_numpy(), dtype=np.float64) for name in known}
    over = columns["finished"]
    over = np.where(np.isnan(over), run.end, over)
    times = [np.where(np.isnan(columns[name]), over, columns[name]) for name in known]
    if "boarded" in table.column_names:  # with migration between replicas
        moves = [np.asarray(table[name].to_numpy()) for name in ("left", "boarded")]
        times[3:3] = [np.where(np.isnan(move), times[2], move) for move in moves]
        names += ["on the way", "decode"]
    return names, [some.tolist() for some in times]


def _interrupted(
    stages: Sequence[Stage], preemptions: Sequence[Preemption], over: float
) -> Sequence[Stage]:
    """Insert preemptions into the stages of a request that ends at `over`."""
    next_times = [*(one["time"] for one in preemptions), over][1:]
    for one, until in zip(preemptions, next_times, strict=True):
        back, decoding = (
            until if isnan(time) else time for time in (one["back_at"], one["decoding_at"])
        )
        swapped = one["how"] == "swap"
        wait = Stage(SWAPPED_OUT if swapped else WAITS_AGAIN, one["time"], back, one)
        work = Stage("prefill" if swapped else AGAIN, back, decoding, one)
        stages = _overlaid(_overlaid(stages, wait), work)
    return stages


def _overlaid(stages: Sequence[Stage], over: Stage) -> Sequence[Stage]:
    """Replace the part of the stages that overlaps another stage."""
    if over.end <= over.begin:
        return list(stages)
    before = [one._replace(end=min(one.end, over.begin)) for one in stages]
    after = [one._replace(begin=max(one.begin, over.end)) for one in stages]
    return [
        *(one for one in before if one.end > one.begin),
        over,
        *(one for one in after if one.end > one.begin),
    ]


def cause_of(preemption: Preemption) -> str:
    """The cause of a preemption as text."""
    by = preemption["by"]
    if preemption["why"] == "displaced":
        return f"displaced by {by}, which is more urgent"
    room = "next block" if preemption["wanted"] == "block" else "prompt"
    if by is None:
        return f"memory: no room for its own {room}"
    return f"memory: room for the {room} of {by}"
