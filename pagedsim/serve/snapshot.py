"""Statistics and snapshots of a server for the live page.

`RollingStats` observes steps and departures in the scheduler's thread: totals, a history of
seconds, and recent latencies. Its cost per step depends only on the prompts that end in it, not on
the size of the batch. `snapshot` runs in that thread, too, and must be cheap: long lists are
truncated, and block tables are only copied; `encode` turns them into a grid of cells, anywhere.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.core.request import State

SECONDS = 60
"""Full seconds of history, besides the current one."""
LATELY = 10.0
"""Window of the latency percentiles, in seconds."""
MOST = 500
"""Maximum number of recent requests in the latency percentiles."""
RATE_SECONDS = 3
"""Rates are averaged over this many full seconds."""

Plain = dict[str, Any]


@dataclass(slots=True)
class Second:
    """Counters of one second of the server's time, and queue lengths at its last step."""

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    used: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    ttfts: tuple[float, int] = (0.0, 0)
    """Sum and number, as of TPOTs."""
    tpots: tuple[float, int] = (0.0, 0)


class RollingStats:
    """Rolling statistics on the server's clock, which may be faster than wall time (`speed`)."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0  # computed, again after a preemption as well
        self.output_tokens = 0
        self.preemptions = 0
        self.finished = 0
        self.aborted = 0
        self.rejected = 0
        self.seconds: deque[Second] = deque([Second()], maxlen=SECONDS + 1)
        self._second = 0  # which one is the last of these
        self._scheduler: Scheduler | None = None
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MOST)  # when, and how long
        self._tpots: deque[tuple[float, float]] = deque(maxlen=MOST)

    # -- as an observer --------------------------------------------------------------------------

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        second = self.at(end)
        outputs = plan.decode_count
        for chunk in plan.chunks:
            if chunk.samples:
                outputs += 1
                self._first_token(chunk.request, end, second)
        lost = len(plan.preemptions)
        self.steps += 1
        self.prompt_tokens += plan.prefill_tokens
        self.output_tokens += outputs
        self.preemptions += lost
        second.prompt_tokens += plan.prefill_tokens
        second.output_tokens += outputs
        second.preemptions += lost
        self._stands(second, scheduler)

    def left(self, request: Request) -> None:
        if request.state is State.ABORTED:
            self.aborted += 1
        elif request.state is State.REJECTED:
            self.rejected += 1
        else:
            self.finished += 1
            self._finished(request)
        if self._scheduler is not None:  # or a silence would stand as its last step began
            self._stands(self.seconds[-1], self._scheduler)

    def _first_token(self, request: Request, end: float, second: Second) -> None:
        if request.first_token_at is not None or request.arrival is None:
            return
        ttft = end - request.arrival
        self._ttfts.append((end, ttft))
        second.ttfts = (second.ttfts[0] + ttft, second.ttfts[1] + 1)

    def _finished(self, request: Request) -> None:
        end, first = request.finished_at, request.first_token_at
        if end is None:
            return
        second = self.at(end)
        if first is not None and request.generated > 1:
            tpot = (end - first) / (request.generated - 1)
            self._tpots.append((end, tpot))
            second.tpots = (second.tpots[0] + tpot, second.tpots[1] + 1)

    @staticmethod
    def _stands(second: Second, scheduler: Scheduler) -> None:
        second.running, second.waiting = len(scheduler.running), scheduler.num_waiting
        second.swapped, second.used = len(scheduler.swapped), scheduler.memory.used

    # -- queries ---------------------------------------------------------------------------------

    def at(self, now: float) -> Second:
        """The entry of the second that contains `now`, or the last one if that is later."""
        ahead = floor(now) - self._second
        if ahead > 0:
            last = self.seconds[-1]
            for _ in range(min(ahead, SECONDS + 1)):
                self.seconds.append(Second(last.running, last.waiting, last.swapped, last.used))
            self._second += ahead
        return self.seconds[-1]

    def look(self, now: float, scheduler: Scheduler) -> None:
        """Update the queue lengths at `now`, also without a step."""
        self._stands(self.at(now), scheduler)

    def rate(self, counter: str) -> float:
        """Average per second of a counter over the last full seconds."""
        whole = list(self.seconds)[-1 - RATE_SECONDS : -1]
        return sum(getattr(second, counter) for second in whole) / len(whole) if whole else 0.0

    def ttft_ms(self, now: float) -> Plain | None:
        """Median and 95th percentile of recent times to first token; None without any."""
        return _spread(self._ttfts, now - LATELY)

    def tpot_ms(self, now: float) -> Plain | None:
        """Median and 95th percentile of the recent TPOT of finished requests; None without any."""
        return _spread(self._tpots, now - LATELY)


def _spread(timed: Sequence[tuple[float, float]], since: float) -> Plain | None:
    values = [value for time, value in timed if time >= since]
    if not values:
        return None
    p50, p95 = (1000 * np.percentile(values, (50, 95), method="inverted_cdf")).tolist()
    return {"p50": round(p50, 2), "p95": round(p95, 2)}


# -- snapshots -------------------------------------------------------------------------------------


MOST_CELLS = 4096
"""Maximum cells of the grid; with more blocks than that a cell stands for several."""
FREE, CACHED = -1, -2
"""Owner of an unallocated cell; CACHED: unallocated, but still in the prefix cache."""

Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Held:
    """A copy of the block tables, taken in the scheduler's thread."""

    total: int
    blocks: list[int]
    """The blocks of all holders, concatenated over their tables."""
    lengths: list[int]
    """Number of blocks of each holder, in batch order."""
    known: list[int]
    """Blocks in the prefix cache, in use or not."""


def held(scheduler: Scheduler, holders: list[Request]) -> Held:
    """Copy the block tables of `holders`."""
    blocks: list[int] = []
    lengths = []
    for request in holders:
        before = len(blocks)
        for table in request.tables:
            blocks += table
        lengths.append(len(blocks) - before)
    memory = scheduler.memory
    return Held(memory.total, blocks, lengths, list(memory.known_blocks()))


def cell_size(total: int) -> int:
    """Blocks per cell for a pool of `total` blocks."""
    return -(-total // MOST_CELLS)


def cells_of(request: Request, total: int) -> list[int]:
    """The cells that contain a request's blocks."""
    size = cell_size(total)
    return sorted({block // size for block in chain.from_iterable(request.tables)})


def cells(held: Held, size: int) -> tuple[list[int], int]:
    """Run-length encoded cells, flat: (owner, blocks in use, shared, run length); shared blocks.

    A cell has `size` blocks. Its owner is the median owner of its used blocks in batch order, which
    is the majority owner if there is one. A shared block counts for its first holder.
    """
    owner, shared = _owners(held)
    used = owner >= 0
    if size == 1:
        table = np.stack([owner, used, shared], axis=1)
    else:
        rows = np.sort(_rows(owner, size, FREE), axis=1)
        count = _rows(used, size, False).sum(axis=1)
        middle = size - count + count // 2  # free blocks are sorted to the front
        whose = rows[np.arange(len(rows)), np.where(count > 0, middle, 0)]
        table = np.stack([whose, count, _rows(shared, size, False).any(axis=1)], axis=1)
    begins = np.flatnonzero(np.any(table[1:] != table[:-1], axis=1)) + 1
    starts = np.concatenate([[0], begins])
    runs = np.diff(np.concatenate([starts, [len(table)]]))
    flat: list[int] = np.column_stack([table[starts], runs]).ravel().tolist()
    return flat, int(np.count_nonzero(shared))


def _owners(held: Held) -> tuple[Ints, Flags]:
    """Owner of each block, and whether it is in several block tables."""
    blocks = np.array(held.blocks, np.int32)
    owner = np.full(held.total, FREE, np.int32)
    whose = np.repeat(np.arange(len(held.lengths), dtype=np.int32), held.lengths)
    owner[blocks[::-1]] = whose[::-1]  # backwards: the first holder is written last, and stays
    known = np.array(held.known, np.int32)
    owner[known[owner[known] == FREE]] = CACHED
    return owner, np.bincount(blocks, minlength=held.total) > 1


def _rows(values: npt.NDArray[np.generic], size: int, rest: int) -> npt.NDArray[np.generic]:
    """Reshape to rows of `size` values, the last padded with `rest`."""
    missing = -len(values) % size
    return np.pad(values, (0, missing), constant_values=rest).reshape(-1, size)


MOST_WAITING = 50
MOST_RUNNING = 200

_SERIES = "running", "waiting", "swapped", "used", "output_tokens", "prompt_tokens", "preemptions"


def snapshot(
    scheduler: Scheduler, tally: RollingStats, now: float, watched: Collection[str] = ()
) -> Plain:
    """The server's state at `now`, with full details of the requests in `watched`."""
    tally.look(now, scheduler)
    seconds = list(tally.seconds)[:-1]
    return {
        "now": round(now, 3),
        "step": tally.steps,
        "waiting": _queue(scheduler.waiting, MOST_WAITING),
        "running": _queue(scheduler.running, MOST_RUNNING),
        "swapped": _queue(scheduler.swapped, MOST_WAITING),
        "blocks": _blocks(scheduler),
        "watched": [_watched(scheduler, name) for name in watched if name in scheduler.requests],
        "totals": {
            "finished": tally.finished,
            "preemptions": tally.preemptions,
            "prompt_tokens": tally.prompt_tokens,
            "output_tokens": tally.output_tokens,
            "aborted": tally.aborted,
            "rejected": tally.rejected,
        },
        "recent": {
            "output_tokens_per_s": round(tally.rate("output_tokens"), 1),
            "prompt_tokens_per_s": round(tally.rate("prompt_tokens"), 1),
            "preemptions_per_s": round(tally.rate("preemptions"), 1),
            "ttft_ms": tally.ttft_ms(now),
            "tpot_ms": tally.tpot_ms(now),
        },
        "history": {
            **{name: [getattr(second, name) for second in seconds] for name in _SERIES},
            "ttft_ms": [_mean_ms(*second.ttfts) for second in seconds],
            "tpot_ms": [_mean_ms(*second.tpots) for second in seconds],
        },
    }


def encode(taken: Plain) -> str:
    """A snapshot as JSON, its blocks as runs of cells."""
    if blocks := taken.get("blocks"):
        runs, shared = cells(blocks["cells"], blocks["cell"])
        taken = taken | {"blocks": blocks | {"cells": runs, "shared": shared}}
    return json.dumps(taken, separators=(",", ":"), allow_nan=False)


def _queue(requests: Collection[Request] | Any, most: int) -> Plain:
    return {"count": len(requests), "first": [_row(request) for request in islice(requests, most)]}


def _row(request: Request) -> Plain:
    """One request; `computed` is included only during prefill."""
    row: Plain = {
        "id": str(request.id),
        "client": request.client,
        "priority": request.priority,
        "prompt": request.prompt_len,
        "output": request.generated,
        "most": request.max_tokens,
        "preemptions": request.preemptions,
        "blocks": _held(request),
    }
    if not request.decoding:
        row["computed"] = request.computed
    return row


def _held(request: Request) -> int:
    tables = request.tables or request.cpu_tables
    return len(tables[0]) if len(tables) == 1 else len(set(chain.from_iterable(tables)))


def _watched(scheduler: Scheduler, name: str) -> Plain:
    """A request with its queue position, from 1, and its cells in the grid."""
    request = scheduler.requests[name]
    queues: dict[State, Iterable[Request]] = {
        State.RUNNING: scheduler.running,
        State.SWAPPED: scheduler.swapped,
        State.HOLDING: scheduler.holding,
    }
    queue = queues.get(request.state, scheduler.waiting)
    place = next((place for place, waiting in enumerate(queue, 1) if waiting is request), None)
    cells = cells_of(request, scheduler.memory.total)
    return _row(request) | {"state": request.state.value, "place": place, "cells": cells}


# -- blocks --------------------------------------------------------------------------------------


def _blocks(scheduler: Scheduler) -> Plain:
    memory = scheduler.memory
    holders = [request for request in scheduler.running if request.tables]
    return {
        "total": memory.total,
        "used": memory.used,
        "cached": memory.cached,
        "saved": memory.shared,
        "size": memory.block_size,
        "cell": cell_size(memory.total),
        "owners": [str(request.id) for request in holders],
        "cells": held(scheduler, holders),
    }


def _mean_ms(seconds: float, count: int) -> float | None:
    return round(1000 * seconds / count, 2) if count else None
