"""A replay of a study: what its requests and servers did, compact enough for a page.

Of each of a few arms' first seeds there are the stages of every request, the blocks in use at every
step, and the preemptions; of a long run, of its busiest stretch. Times are whole milliseconds from
the beginning of that stretch, so that they are exact to half of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import baseline_of, compare, value_of
from pagedsim.metrics.steps import CAME_FROM, REPLICA
from pagedsim.metrics.tables import Floats
from pagedsim.report.gantt import busiest
from pagedsim.report.packed import Arrays
from pagedsim.report.timeline import AGAIN, REJECTED, SWAPPED_OUT, WAITS_AGAIN, lives_of

REQUESTS = 1500
"""Maximum number of requests of an arm."""
STEPS = 8000
"""Maximum number of steps of a server."""
PREEMPTIONS = 5000
"""Maximum number of preemptions of an arm."""
ARMS = 6
SERVERS = 8
"""Maximum numbers of arms, and of servers of an arm."""
BYTES = 700_000
"""Size above which no further arm is added to the first two."""

STAGES = (
    *("queued", "prefill", "decode", WAITS_AGAIN, SWAPPED_OUT, AGAIN, "on the way", REJECTED),
)
"""Names of stages, in the order of their numbers."""
_ATTEMPTS = 3


class Window(NamedTuple):
    """A stretch of time in seconds."""

    begin: float
    end: float
    whole: bool
    """Whether it is the whole run."""


def replay(study: Arms, arrays: Arrays) -> dict[str, Any] | None:
    """The data of a replay; None where nothing was served."""
    runs = [study.of(arm)[0] for arm in _order(study)]
    first = [run for run in runs[:2] if run.requests("arrival").num_rows]
    if not first:
        return None
    window = _window(first)
    courses: list[dict[str, Any]] = []
    for run in runs[:ARMS]:
        if len(courses) >= 2 and arrays.size > BYTES:
            break
        courses.append(_course(run, study, window, arrays))
    return {
        "stages": STAGES,
        "length": math.ceil((window.end - window.begin) * 1e3),
        "begin": window.begin,
        "same": study.same_requests,
        "courses": courses,
        "note": _note(study, first[0], window, courses),
    }


def _order(study: Arms) -> list[str]:
    """The baseline, the arm whose effect is the largest, and the others."""
    baseline = baseline_of(study)
    effects = [
        (abs(math.log(change.ratio.mean)), change.arm)
        for change in compare(study)
        if change.ratio.mean > 0 and (change.sure or not change.ratio.known)
    ]
    most = [max(effects)[1]] if effects else []
    return list(dict.fromkeys([baseline, *most, *study.arms]))


def _note(study: Arms, run: Run, window: Window, courses: Sequence[dict[str, Any]]) -> str:
    parts = [f"Seed {run.seed}"]
    if not window.whole:
        parts.append(f"the busiest stretch of each run, {window.begin:,.1f} to {window.end:,.1f} s")
    if len(courses) < len(study.arms):
        names = ", ".join(study.arms[course["arm"]] for course in courses)
        parts.append(f"{len(courses)} of {len(study.arms)} arms, to keep this page small ({names})")
    if cut := max(course["cut"] for course in courses):
        parts.append(f"without up to {cut:,} requests that waited all the time")
    if any(course["more"] for course in courses):
        parts.append(f"the first {SERVERS} replicas of an arm")
    every = max((s["every"] for course in courses for s in course["servers"]), default=1)
    if every > 1:
        parts.append(f"blocks in use at one step in {every}")
    return "; ".join(parts)


def _window(runs: Sequence[Run]) -> Window:
    """The whole of the runs, or where the first is busiest, with few enough requests of each."""
    whole = Window(0.0, max(run.end for run in runs), True)
    spans = [_spans(run) for run in runs]
    if all(_present(some, whole).sum() <= REQUESTS for some in spans):
        return whole
    count = REQUESTS
    window = whole
    for _ in range(_ATTEMPTS):  # requests that came before are there, too
        count = count * 2 // 3
        arrivals = spans[0][0][busiest(runs[0], count)]
        window = Window(float(arrivals.min()), float(arrivals.max()), False)
        if all(_present(some, window).sum() <= REQUESTS for some in spans):
            break
    return window


def _spans(run: Run) -> tuple[Floats, Floats]:
    """When each request came and when it left."""
    requests = run.by_column()
    left = requests["finished"]
    return requests["arrival"], np.where(np.isnan(left), run.end, left)


def _present(spans: tuple[Floats, Floats], window: Window) -> NDArray[np.bool_]:
    came, left = spans
    mask: NDArray[np.bool_] = (came <= window.end) & (left >= window.begin)
    return mask


def _ms(times: Sequence[float] | Floats, window: Window) -> NDArray[np.int64]:
    """Milliseconds from the beginning of the window."""
    return np.rint((np.asarray(times) - window.begin) * 1e3).astype(np.int64)


def _course(run: Run, study: Arms, window: Window, arrays: Arrays) -> dict[str, Any]:
    """What happened under one arm."""
    table = run.requests()
    present = np.flatnonzero(_present(_spans(run), window))
    begun = table["scheduled" if run.inside else "first_token"].to_numpy()[present]
    rows = present[np.argsort(begun, kind="stable")][:REQUESTS]  # of too many, those that ran
    rows = rows[np.argsort(table["arrival"].to_numpy()[rows], kind="stable")]
    table = table.take(rows)
    column = {name: table[name].to_pylist() for name in table.column_names}
    lives = lives_of(run, table)
    stages = [stage for life in lives for stage in life.stages]
    clients = list(dict.fromkeys([*study.clients, *column["client"]]))
    servers = _servers(run, window, arrays) if run.inside else []
    return {
        "arm": study.arms.index(run.arm),
        "ids": column["request"],
        "client": arrays.add([clients.index(name) for name in column["client"]], "b"),
        "arrival": arrays.add(_ms(column["arrival"], window), "i"),
        **{name: arrays.add(column[f"{name}_tokens"], "i") for name in ("prompt", "output")},
        "sequences": arrays.add(column["sequences"], "i"),
        "server": arrays.add(column.get(REPLICA, [0] * len(rows)), "i"),
        "before": [
            (at, server)
            for at, server in enumerate(column.get(CAME_FROM, ()))
            if server is not None
        ],
        "first": arrays.add(np.cumsum([0, *(len(life.stages) for life in lives)]), "i"),
        "kind": arrays.add([STAGES.index(stage.name) for stage in stages], "b"),
        "end": arrays.add(_ms([stage.end for stage in stages], window), "i"),
        "finished": arrays.add([state == "finished" for state in column["state"]], "b"),
        "lost": _lost(run, window, column["request"], arrays),
        "servers": servers,
        "cut": len(present) - len(rows),
        "more": max(len(run.replicas) - SERVERS, 0),
        "size": value_of(run.summary, "block_size") if run.inside else 0,
    }


def _lost(
    run: Run, window: Window, requests: Sequence[int | str], arrays: Arrays
) -> dict[str, int]:
    """The preemptions of requests of the window, by time."""
    place = {name: at for at, name in enumerate(requests)}
    events = [
        row
        for row in run.events().to_pylist()
        if window.begin <= row["time"] <= window.end and row["request"] in place
    ][:PREEMPTIONS]
    return {
        "time": arrays.add(_ms([event["time"] for event in events], window), "i"),
        "request": arrays.add([place[event["request"]] for event in events], "i"),
        "by": arrays.add([place.get(event["by"], -1) for event in events], "i"),
        "swap": arrays.add([event["how"] == "swap" for event in events], "b"),
        "displaced": arrays.add([event["why"] == "displaced" for event in events], "b"),
    }


def _servers(run: Run, window: Window, arrays: Arrays) -> list[dict[str, Any]]:
    """The blocks in use from each step's beginning on, by server; none between steps."""
    rows = run.replicas or [{"name": "", **run.summary}]
    servers = []
    every = run.steps_by_replica("start", "end", "used_blocks")
    for row, (start, end, used) in zip(rows[:SERVERS], every, strict=False):
        some = slice(np.searchsorted(end, window.begin), np.searchsorted(start, window.end))
        start, end, used = start[some], end[some], used[some]
        left_out = max(-(-len(start) // STEPS), 1)
        idle = np.append(start[1:] > end[:-1] + 1e-3, np.full(min(len(end), 1), True))
        times = np.concatenate([start[::left_out], end[idle]])
        values = np.concatenate([used[::left_out], np.zeros(idle.sum())])
        order = np.argsort(times, kind="stable")
        servers.append(
            {
                "name": row["name"],
                "total": int(row["total_blocks"]),
                "every": left_out,
                "time": arrays.add(_ms(times[order], window), "i"),
                "used": arrays.add(values[order], "i"),
            }
        )
    return servers
