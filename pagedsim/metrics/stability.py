"""Whether a server keeps up with open-loop arrivals, by its table of requests.

The *backlog* is the number of requests that have come and not left. Under a steady rate of arrivals
that of a server that keeps up fluctuates about a level; that of an overloaded server grows by what
arrives less what is completed. So completions are held against arrivals over the window of arrivals
without its first quarter, in blocks, whose spread gives the confidence interval.

These are no overload:

- closed loops, and arrivals all at once, which have no rate to keep up with: they are not judged;
- a burst that passes, or a trace that ends in one: its blocks differ too much for a trend, and if
  many requests wait at the end, nothing is sure (`Backlog.unsure`);
- a batch that fills up at the beginning of a run: the backlog must have grown by more than that
  explains by what answers take without queueing, or else requests that wait must have.

Rejected and aborted requests are left out: what is turned away is no backlog.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.steps import CAME_FROM, REPLICA
from pagedsim.metrics.tables import Floats, Mask, Requests

GROWTH = 0.02
"""An overload is a backlog that grows by more than this share of what arrives."""
BEHIND = 0.05
"""So large a share of all requests waiting at the last arrival is no small matter."""
FEW = 10
"""At most so many requests at the last arrival are no overload."""
BEGINNING = 0.25
"""Share of the window of arrivals that is left out."""
STRETCH = 3.0
"""Under load, tokens take at most about so many times as long as without."""
_BLOCKS = 24
_T = 2.06866
"""The two-sided 95 % quantile of Student's t for these blocks."""


class Growth(NamedTuple):
    """What a backlog grew by, as a share of what arrived, and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Backlog:
    """Arrivals at a stage and completions in the window of arrivals, after `BEGINNING`."""

    stage: str
    """A pool of replicas; empty: the whole server."""
    arrived_per_s: float
    completed_per_s: float
    growth: Growth
    """Growth of all requests at the stage."""
    waiting_growth: Growth
    """Growth of the requests that had not begun there."""
    requests: int
    """Requests that came to the stage in all."""
    present: int
    """Requests at the stage when the last one arrived."""
    waiting: int
    """Requests that were present but had not begun there."""
    filling: float
    """What the growth would be if batches filled up and nothing queued."""
    enough: int
    """Number of requests of a run whose batches would be full before the judged window."""

    @property
    def overloaded(self) -> bool:
        """Whether the backlog surely grew, and not only as a batch filled up."""
        grew = self._grew and self.growth.low > self.filling
        queued = _surely(self.waiting_growth) and self.waiting > FEW
        return grew or queued

    @property
    def unsure(self) -> bool:
        """Whether it may be overloaded: it grew, but perhaps only as batches filled up, or a large
        share of all requests waited, but arrivals vary too much to tell a trend."""
        many = self.waiting > max(BEHIND * self.requests, FEW)
        return (self._grew or many) and not self.overloaded

    @property
    def _grew(self) -> bool:
        return _surely(self.growth) and self.present > FEW


@dataclass(frozen=True)
class _Stay:
    """When requests came to a stage, began there, and left it; NaN where they did not."""

    stage: str
    came: Floats
    began: Floats
    left: Floats
    service: Floats
    """Seconds that requests take there without queueing."""


def backlogs(requests: Requests, replicas: Sequence[ReplicaFacts] = ()) -> list[Backlog]:
    """Backlogs of the whole server and, if there are several, of its pools; none without a rate.

    Arrivals are taken to be independent of answers, but for later turns of sessions.
    """
    served = ~(requests.in_state("rejected") | requests.in_state("aborted"))
    arrival, turn = requests["arrival"][served], requests.optional("turn")
    independent = arrival if turn is None else arrival[turn[served] <= 1]
    if len(independent) <= FEW or (first := independent.min()) == (last := independent.max()):
        return []
    stays = _stays(requests, replicas, served)
    return [_backlog(stay, float(first), float(last)) for stay in stays]


def overload_of(judged: Sequence[Backlog]) -> Backlog | None:
    """The overloaded pool with most requests, or the whole server if none is; None: all keep up."""
    over = [backlog for backlog in judged if backlog.overloaded]
    pools = [backlog for backlog in over if backlog.stage]
    return max(pools or over, key=lambda backlog: backlog.present, default=None)


def mean_backlogs(summaries: Iterable[Mapping[str, Any]]) -> list[Backlog]:
    """Pooled backlogs of several runs of one server, by their summaries, which have narrower
    intervals than each run; empty if a run was not judged."""
    runs = [list(map(_read, summary.get("backlogs", ()))) for summary in summaries]
    return [_mean(stages) for stages in zip(*runs, strict=False)]


def keep_up(summaries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether in runs of one server, by their summaries, the backlog did not surely grow."""
    return overload_of(mean_backlogs(summaries)) is None


def load_note(summaries: Sequence[Mapping[str, Any]]) -> str | None:
    """A note on runs of one server that are overloaded, or may be; None if they keep up."""
    judged = mean_backlogs(summaries)
    if (backlog := overload_of(judged)) is None:
        return unsure_note(judged)
    mean, low, high = (f"{100 * share:.0f} %" for share in backlog.growth)
    return (
        f"{backlog.present:,} of {judged[0].requests:,} {_cause(summaries, backlog)}; "
        f"{backlog.completed_per_s:.3g} of {backlog.arrived_per_s:.3g} requests/s were completed "
        f"until then (backlog +{mean} of what arrives, {low} to {high})"
    )


def brief_note(summaries: Sequence[Mapping[str, Any]]) -> tuple[str, int] | None:
    """What a note on many servers says of an overload, and of how many requests; None if they keep
    up."""
    judged = mean_backlogs(summaries)
    if (backlog := overload_of(judged)) is not None:
        return _cause(summaries, backlog), backlog.present
    if not any(backlog.unsure for backlog in judged):
        return None
    what = "requests were there when the last one arrived: whether the server keeps up is not known"
    return what, judged[0].present


def _cause(summaries: Sequence[Mapping[str, Any]], backlog: Backlog) -> str:
    cause = f"an overload{f' of pool {backlog.stage}' if backlog.stage else ''}"
    if any(summary.get("outages") for summary in summaries):
        cause += ", or the work that outages of replicas left (fleet.failures)"
    else:
        cause += ": latencies grow with the length of the run"
    return f"requests were not completed when the last one arrived, {cause}"


def unsure_note(judged: Sequence[Backlog]) -> str | None:
    """A note where runs do not show whether a server keeps up; None if they do."""
    unsure = [backlog for backlog in judged if backlog.unsure]
    if not unsure or overload_of(judged) is not None:
        return None
    backlog = max(unsure, key=lambda stage: stage.present)
    why = (
        f"{backlog.waiting:,} of them waiting, but arrivals vary too much to tell an overload from "
        "bursts"
    )
    if backlog.growth.low > 0:
        why = (
            "and their number grew, perhaps only since batches filled up; some "
            f"{float(f'{backlog.enough:.2g}'):,.0f} requests would show it"
        )
    return (
        f"whether {f'pool {backlog.stage}' if backlog.stage else 'the server'} keeps up is not "
        f"known: {backlog.present:,} of {judged[0].requests:,} requests were there when the last "
        f"one arrived, {why}"
    )


def _surely(growth: Growth) -> bool:
    return growth.low > 0 and growth.mean > GROWTH


_GROWTHS = ("growth", "waiting_growth")


def _read(record: Mapping[str, Any]) -> Backlog:
    return Backlog(**{**record, **{name: Growth(*record[name]) for name in _GROWTHS}})


def _mean(runs: Sequence[Backlog]) -> Backlog:
    def mean(name: str) -> float:
        return float(sum(getattr(run, name) for run in runs) / len(runs))

    means: dict[str, Any] = {
        **{name: mean(name) for name in ("arrived_per_s", "completed_per_s", "filling")},
        **{name: round(mean(name)) for name in ("requests", "present", "waiting", "enough")},
        **{name: _pooled([getattr(run, name) for run in runs]) for name in _GROWTHS},
    }
    return replace(runs[0], **means)


def _pooled(growths: Sequence[Growth]) -> Growth:
    mean = sum(growth.mean for growth in growths) / len(growths)
    reach = sqrt(sum((growth.high - growth.mean) ** 2 for growth in growths)) / len(growths)
    return Growth(mean, mean - reach, mean + reach)


def _service_seconds(requests: Requests) -> Floats:
    """Seconds of each answer without queueing: the shortest TTFT, then the pace of a full batch."""
    done = requests.in_state("finished")
    names = ("arrival", "first_token", "finished", "output_tokens")
    arrival, first, finished, tokens = (requests[name][done] for name in names)
    more = tokens - 1
    pace = (finished - first)[more > 0] / more[more > 0]
    if not len(first):
        return np.full(1, np.ptp(requests["arrival"]))  # at the least
    loaded = min(np.quantile(pace, 0.9), STRETCH * pace.min()) if len(pace) else 0.0
    return np.asarray((first - arrival).min() + loaded * more)


def _stays(requests: Requests, replicas: Sequence[ReplicaFacts], served: Mask) -> Iterator[_Stay]:
    """The stays at the whole server, then those at each of several pools.

    A request that a prefill pool hands on stays there until its KV cache is complete, and from then
    on at the next pool.
    """
    times = ("arrival", "scheduled", "first_token", "finished")
    arrival, began, first, finished = (requests[name][served] for name in times)
    if np.isnan(began).all():  # another server's: only its answers are seen
        began = first
    handed, ready, boarded, source = _handed_on(requests, replicas, served)
    service = _service_seconds(requests)
    yield _Stay("", arrival, np.where(handed, boarded, began), finished, service)
    pools = np.array([replica.pool for replica in replicas] + [""])  # the last: at no replica
    names = list(dict.fromkeys(pools[:-1].tolist()))
    if len(names) < 2:
        return
    at = pools[requests[REPLICA][served]]
    before = np.where(handed, pools[source], at)
    for name in names:
        direct, later = before == name, handed & (at == name)
        came = np.concatenate([arrival[direct], ready[later]])
        starts = np.concatenate([began[direct], boarded[later]])
        ends = np.concatenate([np.where(handed, ready, finished)[direct], finished[later]])
        prefills = np.fmin.reduce(ends - came, initial=np.inf, keepdims=True)
        yield _Stay(name, came, starts, ends, prefills if handed[direct].any() else service)


def _handed_on(
    requests: Requests, replicas: Sequence[ReplicaFacts], served: Mask
) -> tuple[Mask, Floats, Floats, NDArray[np.int64]]:
    """Which requests a prefill replica handed on, when their KV cache was complete there, when
    they boarded the next replica, and the former."""
    if (origin := requests.optional(CAME_FROM)) is None:
        nothing = np.full(int(served.sum()), np.nan)
        return np.zeros(len(nothing), bool), nothing, nothing, np.full(len(nothing), -1)
    origin = origin[served]
    source = np.where(np.isnan(origin), -1, origin).astype(np.int64)
    prefills = np.array([replica.role == "prefill" for replica in replicas] + [False])
    return prefills[source], requests["left"][served], requests["boarded"][served], source


def _backlog(stay: _Stay, first: float, last: float) -> Backlog:
    """What is judged from the first to the last arrival at the server."""
    begin = first + BEGINNING * (last - first)
    arrived, began, left = (
        np.histogram(times[~np.isnan(times)], _BLOCKS, (begin, last))[0]
        for times in (stay.came, stay.began, stay.left)
    )
    came = stay.came <= last
    return Backlog(
        stage=stay.stage,
        arrived_per_s=float(arrived.sum() / (last - begin)),
        completed_per_s=float(left.sum() / (last - begin)),
        growth=_growth(arrived - left, arrived),
        waiting_growth=_growth(arrived - began, arrived),
        requests=len(came),
        present=int(np.sum(came & ~(stay.left <= last))),
        waiting=int(np.sum(came & ~(stay.began <= last))),
        filling=_filling(stay.service, last - first),
        enough=ceil(len(came) * np.quantile(stay.service, 0.99) / BEGINNING / (last - first)),
    )


def _filling(service: Floats, window: float) -> float:
    """Growth by requests that take so long, after `BEGINNING` of a window, by Little's law: those
    that came a time t after it began are present for the part of their service within t."""
    present = [np.minimum(service, time).mean() for time in (BEGINNING * window, window)]
    return float((present[1] - present[0]) / ((1 - BEGINNING) * window))


def _growth(more: NDArray[np.int64], arrived: NDArray[np.int64]) -> Growth:
    """Mean growth of the blocks, as a share of what arrived in them on average."""
    shares = more / max(arrived.mean(), 1 / _BLOCKS)
    mean, reach = float(shares.mean()), _T * float(shares.std(ddof=1)) / sqrt(_BLOCKS)
    return Growth(mean, mean - reach, mean + reach)
