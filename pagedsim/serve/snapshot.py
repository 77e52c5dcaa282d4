"""What a server looks like at one moment, for the live page.

`snapshot` runs in the scheduler's thread, where it must be cheap: lists end where nobody would read
on, and blocks are only copied. `encode` counts them, in any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice
from typing import Any

from pagedsim.core import Request, Scheduler
from pagedsim.core.request import State
from pagedsim.serve.grid import cell_size, cells, cells_of, held
from pagedsim.serve.tally import Second, Spread, Tally

MOST_WAITING = 50
MOST_RUNNING = 200

Plain = dict[str, Any]

_SERIES: dict[str, Callable[[Second], float | None]] = {
    "running": lambda second: second.running,
    "waiting": lambda second: second.waiting,
    "swapped": lambda second: second.swapped,
    "used": lambda second: second.used,
    "output_tokens": lambda second: second.output_tokens,
    "prompt_tokens": lambda second: second.prompt_tokens,
    "preemptions": lambda second: second.preemptions,
    "ttft_ms": lambda second: _mean_ms(second.ttfts),
    "tpot_ms": lambda second: _mean_ms(second.tpots),
}


def snapshot(
    scheduler: Scheduler, tally: Tally, now: float, watched: Collection[str] = ()
) -> Plain:
    """The server at `now`; of the requests in `watched` everything, wherever they stand."""
    tally.look(now, scheduler)
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
            "output_tokens_per_s": round(tally.rate(lambda second: second.output_tokens), 1),
            "prompt_tokens_per_s": round(tally.rate(lambda second: second.prompt_tokens), 1),
            "preemptions_per_s": round(tally.rate(lambda second: second.preemptions), 1),
            "ttft_ms": _spread_ms(tally.ttft(now)),
            "tpot_ms": _spread_ms(tally.tpot(now)),
        },
        "history": {
            name: [of(second) for second in islice(tally.seconds, len(tally.seconds) - 1)]
            for name, of in _SERIES.items()
        },
    }


def encode(taken: Plain) -> str:
    """A snapshot as JSON, its blocks as runs of cells."""
    if blocks := taken.get("blocks"):
        runs, shared = cells(blocks["cells"], blocks["cell"])
        taken = taken | {"blocks": blocks | {"cells": runs, "shared": shared}}
    return json.dumps(taken, separators=(",", ":"), allow_nan=False)


def _queue(requests: Collection[Request] | Any, most: int) -> Plain:
    return {"count": len(requests), "first": [_row(one) for one in islice(requests, most)]}


def _row(request: Request) -> Plain:
    """One request; what it has computed is told only while it is not all of its prompt."""
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
    """A request with its place in its queue, counted from 1, and its cells in the grid."""
    request = scheduler.requests[name]
    queue: Iterable[Request] = {
        State.RUNNING: scheduler.running,
        State.SWAPPED: scheduler.swapped,
    }.get(request.state, scheduler.waiting)
    place = next((place for place, one in enumerate(queue, 1) if one is request), None)
    cells = cells_of(request, scheduler.memory.total)
    return _row(request) | {"state": request.state.value, "place": place, "cells": cells}


# -- blocks --------------------------------------------------------------------------------------


def _blocks(scheduler: Scheduler) -> Plain:
    memory = scheduler.memory
    holders = [one for one in (*scheduler.running, *scheduler.queues.leaving) if one.tables]
    return {
        "total": memory.total,
        "used": memory.used,
        "cached": memory.cached,
        "saved": memory.shared,
        "size": memory.block_size,
        "cell": cell_size(memory.total),
        "owners": [str(one.id) for one in holders],
        "cells": held(scheduler, holders),
    }


# -- times ---------------------------------------------------------------------------------------


def _mean_ms(times: tuple[float, int]) -> float | None:
    seconds, count = times
    return round(1000 * seconds / count, 2) if count else None


def _spread_ms(spread: Spread | None) -> Plain | None:
    if spread is None:
        return None
    return {name: round(1000 * value, 2) for name, value in spread._asdict().items()}
