"""The stages of each request: queued, prefill, decode; and the time that preemptions took."""

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
"""A request waits for memory; waits with its blocks on the CPU; computes what it lost."""

Preemption = Mapping[str, Any]
"""A row of preemptions.parquet."""


class Stage(NamedTuple):
    """What a request does for some time, in seconds."""

    name: str
    begin: float
    end: float
    preemption: Preemption | None = None
    """The one that put it there."""


class Life(NamedTuple):
    """What became of one request."""

    stages: Sequence[Stage]
    preemptions: Sequence[Preemption]


def lives_of(run: Run, requests: pa.Table) -> list[Life]:
    """Those of some rows of a run's requests."""
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
        # A request that began anew on another replica has left behind what came before.
        mine = [one for one in preemptions.get(request, ()) if one["time"] >= own[1]]
        lives.append(Life(_interrupted(stages, mine, own[-1]), mine))
    return lives


def _known(run: Run, table: pa.Table) -> tuple[list[str], list[list[float]]]:
    """What requests do one after the other, and when each of that begins, with the end of all."""
    known = ["arrival", "scheduled" if run.inside else "first_token", "first_token", "finished"]
    names = ["queued", "prefill", "decode"]
    columns = {name: np.asarray(table[name].to_numpy(), dtype=np.float64) for name in known}
    over = columns["finished"]
    over = np.where(np.isnan(over), run.end, over)
    times = [np.where(np.isnan(columns[name]), over, columns[name]) for name in known]
    if "boarded" in table.column_names:  # replicas hand requests on
        moves = [np.asarray(table[name].to_numpy()) for name in ("left", "boarded")]
        times[3:3] = [np.where(np.isnan(move), times[2], move) for move in moves]
        names += ["on the way", "decode"]
    return names, [some.tolist() for some in times]


def _interrupted(
    stages: Sequence[Stage], preemptions: Sequence[Preemption], over: float
) -> Sequence[Stage]:
    """The stages of a request that is `over` then, with its preemptions among them."""
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
    """The stages with another in the place of all that lies within its time."""
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
    """Why a request was preempted, in words."""
    by = preemption["by"]
    if preemption["why"] == "displaced":
        return f"displaced by {by}, which is more urgent"
    room = "next block" if preemption["wanted"] == "block" else "prompt"
    if by is None:
        return f"memory: no room for its own {room}"
    return f"memory: room for the {room} of {by}"
