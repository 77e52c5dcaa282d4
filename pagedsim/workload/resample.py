"""A block bootstrap of a trace: each seed serves windows of it that are drawn with replacement.

A trace with its own times is one observation. Drawn from its windows it becomes as many as there
are seeds, alike in what happens within a window, from bursts to lengths that go together.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.workload.traces import Table
from pagedsim.workload.traces.rows import Link

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
FEW = 10
"""Fewer windows than these say little of how much the traffic varies."""


def resampled(table: Table, seconds: float, random: np.random.Generator) -> tuple[Table, str]:
    """As many windows as the trace has, each as likely as the others, end to end, and a notice.

    Windows have about `seconds`, so that they divide the trace. Turns of a session come with its
    first, as long after it as they did. Where a window is drawn again, blocks that prompts of no
    other window have are others, or a prefix cache would know all of it.
    """
    assert table.arrival is not None
    times = table.arrival - table.arrival[0]
    span = float(times[-1]) * len(times) / max(len(times) - 1, 1)
    count = round(span / seconds)
    if count < 2:
        raise ConfigError(
            f"resample={seconds:g}: must be at most half of the trace's {span:.4g} s, "
            "so that there are windows to draw from"
        )
    length = span / count
    window = np.minimum(times[_roots(table)] // length, count - 1).astype(np.int64)
    members = [np.flatnonzero(window == number) for number in range(count)]
    drawn = random.integers(count, size=count)
    rows = np.concatenate([members[number] for number in drawn])
    if not len(rows):
        raise ConfigError(f"resample={seconds:g}: the windows drawn have no requests")
    places = np.repeat(np.arange(count), [len(members[number]) for number in drawn])
    arrival = times[rows] + (places - window[rows]) * length
    order = np.argsort(arrival, kind="stable")
    table = _taken(table, rows[order], places[order], arrival[order], window)
    few = f"; {count} windows say little of how much traffic varies" if count < FEW else ""
    return table, (
        f"each seed serves {count} windows of {length:.4g} s drawn from the trace with "
        f"replacement, a block bootstrap (resample={seconds:g}): intervals are of such draws{few}"
    )


def _taken(table: Table, rows: Rows, places: Rows, arrival: Floats, window: Rows) -> Table:
    """These rows of a table, at these times; names of sessions and of blocks are those of the
    places among the windows that were drawn."""
    links: list[Link] | None = None
    if table.links is not None:
        renamed = zip(places.tolist(), (table.links[row] for row in rows), strict=True)
        links = [((place, name), (place, before)) for place, (name, before) in renamed]
    ids, starts = _blocks(table, rows, places, window)
    return replace(
        table,
        arrival=arrival,
        prompt_len=table.prompt_len[rows],
        output_len=table.output_len[rows],
        client=table.client and [table.client[row] for row in rows],
        priority=None if table.priority is None else table.priority[rows],
        extra=table.extra and [table.extra[row] for row in rows],
        links=links,
        block_ids=ids,
        block_starts=starts,
    )


def _roots(table: Table) -> Rows:
    """The row with which the session of each row begins; of rows without sessions, themselves."""
    roots = np.arange(len(table.prompt_len))
    last: dict[object, int] = {}
    for row, (name, before) in enumerate(table.links or ()):
        roots[row] = roots[last[before]] if before in last else row
        last[name] = row
    return roots


def _blocks(
    table: Table, rows: Rows, places: Rows, window: Rows
) -> tuple[Rows | None, Rows | None]:
    """The blocks of the rows; those of a single window are named after its place."""
    if table.block_ids is None or table.block_starts is None:
        return None, None
    ids, begins, counts = table.block_ids, table.block_starts, np.diff(table.block_starts)
    owner = np.repeat(window, counts)
    names = int(ids.max(initial=-1)) + 1
    first, last = np.full(names, len(window)), np.full(names, -1)
    np.minimum.at(first, ids, owner)
    np.maximum.at(last, ids, owner)
    taken = np.concatenate([ids[begins[row] : begins[row + 1]] for row in rows])
    shift = np.repeat(places + 1, counts[rows]) * names
    taken = np.where(first[taken] == last[taken], taken + shift, taken)
    return taken, np.concatenate([[0], np.cumsum(counts[rows])])
