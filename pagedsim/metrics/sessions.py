"""Metrics of sessions, included in those of `definitions.py`.

A session is finished when all its requests are; one with a rejected, aborted or unfinished request
is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.metric import MORE, Metrics
from pagedsim.metrics.tables import Floats, Served

SESSIONS = Metrics()


class Spans(NamedTuple):
    """Finished sessions: duration, time without a request at the server, tokens generated."""

    seconds: Floats
    away: Floats
    tokens: Floats


@SESSIONS.tally("Sessions finished", "count", MORE)
def sessions_finished(served: Served) -> int | None:
    """Sessions all of whose requests were served to their end."""
    spans = _spans(served)
    return None if spans is None else len(spans.seconds)


@SESSIONS.spread("Session time")
def session_time(served: Served) -> tuple[Floats, Floats] | None:
    """From the first arrival of a finished session to its last answer."""
    spans = _spans(served)
    return None if spans is None else _each(spans.seconds)


@SESSIONS.spread("Session at server")
def session_served_time(served: Served) -> tuple[Floats, Floats] | None:
    """The part of a finished session in which any of its requests waited or was served: without
    the time in which its user thinks or its tools run."""
    spans = _spans(served)
    return None if spans is None else _each(spans.seconds - spans.away)


@SESSIONS.spread("Session per token")
def session_time_per_token(served: Served) -> tuple[Floats, Floats] | None:
    """Session time divided by the tokens generated in the session, those of all sequences of all
    its requests: one value a finished session that generated any."""
    if (spans := _spans(served)) is None:
        return None
    some = spans.tokens > 0
    return _each(spans.seconds[some] / spans.tokens[some])


@SESSIONS.tally("Sessions", "1/s", MORE)
def sessions_per_s(served: Served) -> float | None:
    """Sessions finished, over the makespan."""
    spans = _spans(served)
    return None if spans is None else served.per_second(len(spans.seconds))


def _each(values: Floats) -> tuple[Floats, Floats]:
    return values, np.ones(len(values))


def _spans(served: Served) -> Spans | None:
    """The finished sessions; None if no request belongs to one."""
    if (session := served.requests.session) is None:
        return None
    rows = np.flatnonzero(served.mask & (session >= 0))
    arrival, finished = (served.requests[name][rows] for name in ("arrival", "finished"))
    order = np.lexsort((arrival, session[rows]))
    rows, arrival, finished = rows[order], arrival[order], finished[order]
    begins = np.flatnonzero(np.diff(session[rows], prepend=-1))
    whole = np.logical_and.reduceat(served.finished[rows], begins) if len(rows) else begins > 0
    last = _latest(finished, begins)
    ends = np.append(begins[1:], len(rows)) - 1
    gaps = np.concatenate([[0.0], np.maximum(arrival[1:] - last[:-1], 0.0)])[: len(rows)]
    gaps[begins] = 0.0
    generated = served.requests.generated[rows].astype(np.float64)
    away, tokens = (
        np.add.reduceat(each, begins) if len(rows) else each for each in (gaps, generated)
    )
    return Spans((last[ends] - arrival[begins])[whole], away[whole], tokens[whole])


def _latest(finished: Floats, begins: NDArray[np.int64]) -> Floats:
    """The running maximum of the ends within each session."""
    latest = np.empty(len(finished))
    for begin, end in zip(begins, np.append(begins[1:], len(finished)), strict=True):
        latest[begin:end] = np.maximum.accumulate(finished[begin:end])
    return latest
