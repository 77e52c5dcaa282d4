"""Whether a server keeps up with open-loop arrivals, by its table of requests.

The *backlog* is the number of requests that have come and not left. Under a steady rate of arrivals
that of a server that keeps up fluctuates about a level; that of an overloaded server grows by what
arrives less what is completed. So completions are held against arrivals over the window of arrivals
without its first quarter, in blocks, whose spread gives the confidence interval.

These are told apart from an overload:

- closed loops, and arrivals all at once, which have no rate to keep up with: they are not judged;
- a burst that passes, or a trace that ends in one: its blocks differ too much for a trend;
- the beginning of a run, in which a batch fills up and any backlog grows: the window must be
  `SPANS` times as long as requests take at the least, or what waits for a place in a batch must
  grow, too.

Rejected and aborted requests are left out: what is turned away is no backlog.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.compare import estimate
from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.steps import CAME_FROM, REPLICA
from pagedsim.metrics.tables import Floats, Mask, Requests

GROWTH = 0.02
"""An overload is a backlog that grows by more than this share of what arrives."""
FEW = 10
"""At most so many requests at the last arrival are no overload."""
SPANS = 10
"""A window is long if it has so many times what requests take at the least. Under load they take up
to three times that, and in its first quarter such a batch has filled up."""
BEGINNING = 0.25
"""Share of the window that is left out."""
_BLOCKS = 24


@dataclass(frozen=True)
class Backlog:
    """What came to a stage and what it completed in the window of arrivals, after `BEGINNING`."""

    stage: str
    """A pool of replicas; empty: the whole server."""
    arrived_per_s: float
    completed_per_s: float
    growth: float
    """What the backlog grew by, as a share of what arrived. In a short window only requests that
    wait count, since those in a batch may be there to stay."""
    growth_low: float
    growth_high: float
    """Its 95 % confidence interval."""
    present: int
    """Requests at the stage when the last one arrived."""
    waiting: int
    """Those of them that had not begun there."""
    short: bool
    """Whether the window is less than `SPANS` times as long as requests take at the least."""

    @property
    def overloaded(self) -> bool:
        """Whether the backlog surely grew, and by more than `GROWTH`."""
        behind = self.waiting if self.short else self.present
        return self.growth_low > 0 and self.growth > GROWTH and behind > FEW


@dataclass(frozen=True)
class _Stay:
    """When requests came to a stage, began there, and left it; NaN where they did not."""

    stage: str
    came: Floats
    began: Floats
    left: Floats


def backlogs(requests: Requests, replicas: Sequence[ReplicaFacts] = ()) -> list[Backlog]:
    """That of the whole server, then those of its pools, if it has several; none without a rate.

    Arrivals are taken to be independent of answers, but for later turns of sessions.
    """
    served = ~(requests.in_state("rejected") | requests.in_state("aborted"))
    arrival, turn = requests["arrival"][served], requests.optional("turn")
    independent = arrival if turn is None else arrival[turn[served] <= 1]
    if len(independent) <= FEW or (first := independent.min()) == (last := independent.max()):
        return []
    long = last - first >= SPANS * _least_seconds(requests)
    stays = list(_stays(requests, replicas, served))
    return [_backlog(stay, float(first), float(last), long) for stay in stays]


def overload_of(judged: Sequence[Backlog]) -> Backlog | None:
    """The overloaded pool with most requests, or the whole server if none is; None: all keep up."""
    over = [backlog for backlog in judged if backlog.overloaded]
    pools = [backlog for backlog in over if backlog.stage]
    return max(pools or over, key=lambda backlog: backlog.present, default=None)


def mean_backlogs(summaries: Iterable[Mapping[str, Any]]) -> list[Backlog]:
    """Those of several runs of one server, by their summaries, taken together, which is surer than
    each alone; empty if one was not judged."""
    runs = [[Backlog(**record) for record in summary.get("backlogs", ())] for summary in summaries]
    return [_mean(stages) for stages in zip(*runs, strict=False)]


def short_note(judged: Sequence[Backlog]) -> str | None:
    """A note that the runs cannot show whether a server keeps up; None if they can."""
    if not judged or not judged[0].short or judged[0].overloaded:
        return None
    return (
        f"the runs are short: {judged[0].present} requests were there when the last one arrived, "
        f"and requests came for less than {SPANS} times as long as one takes at the least; more "
        "requests would show whether it keeps up"
    )


def _mean(runs: Sequence[Backlog]) -> Backlog:
    count = len(runs)
    growth = sum(run.growth for run in runs) / count
    half = sqrt(sum((run.growth_high - run.growth) ** 2 for run in runs)) / count
    return Backlog(
        stage=runs[0].stage,
        arrived_per_s=sum(run.arrived_per_s for run in runs) / count,
        completed_per_s=sum(run.completed_per_s for run in runs) / count,
        growth=growth,
        growth_low=growth - half,
        growth_high=growth + half,
        present=round(sum(run.present for run in runs) / count),
        waiting=round(sum(run.waiting for run in runs) / count),
        short=any(run.short for run in runs),
    )


def _least_seconds(requests: Requests) -> float:
    """What an average answer takes by the shortest TTFT and the shortest TPOT of all."""
    done = requests.in_state("finished")
    names = ("arrival", "first_token", "finished", "output_tokens")
    arrival, first, finished, tokens = (requests[name][done] for name in names)
    more = tokens - 1
    pace = (finished - first)[more > 0] / more[more > 0]
    if not len(pace):
        return float((finished - arrival).min(initial=np.inf))
    return float((first - arrival).min() + pace.min() * more.mean())


def _stays(requests: Requests, replicas: Sequence[ReplicaFacts], served: Mask) -> Iterator[_Stay]:
    """Those at the whole server, then at each of several pools.

    A pool that hands prefilled requests on has them until their KV cache is complete; the next has
    them from then on.
    """
    times = ("arrival", "scheduled", "first_token", "finished")
    arrival, began, first, finished = (requests[name][served] for name in times)
    if np.isnan(began).all():  # another server's: only its answers are seen
        began = first
    handed, ready, boarded, source = _handed_on(requests, replicas, served)
    yield _Stay("", arrival, np.where(handed, boarded, began), finished)
    pools = np.array([replica.pool for replica in replicas] + [""])  # the last: at no replica
    names = list(dict.fromkeys(pools[:-1].tolist()))
    if len(names) < 2:
        return
    at = pools[requests[REPLICA][served]]
    before = np.where(handed, pools[source], at)
    for name in names:
        own, later = before == name, handed & (at == name)
        came = np.concatenate([arrival[own], ready[later]])
        starts = np.concatenate([began[own], boarded[later]])
        ends = np.concatenate([np.where(handed, ready, finished)[own], finished[later]])
        yield _Stay(name, came, starts, ends)


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


def _backlog(stay: _Stay, first: float, last: float, long: bool) -> Backlog:
    """What is judged from the first to the last arrival at the server."""
    begin = first + BEGINNING * (last - first)
    arrived, began, left = (
        np.histogram(times[~np.isnan(times)], _BLOCKS, (begin, last))[0]
        for times in (stay.came, stay.began, stay.left)
    )
    more = (arrived - (left if long else began)) / max(arrived.mean(), 1 / _BLOCKS)
    growth = estimate(more.tolist())
    came = stay.came <= last
    seconds = last - begin
    return Backlog(
        stage=stay.stage,
        arrived_per_s=float(arrived.sum() / seconds),
        completed_per_s=float(left.sum() / seconds),
        growth=growth.mean,
        growth_low=growth.low if growth.known else growth.mean,  # all blocks are alike
        growth_high=growth.high if growth.known else growth.mean,
        present=int(np.sum(came & ~(stay.left <= last))),
        waiting=int(np.sum(came & ~(stay.began <= last))),
        short=not long,
    )
