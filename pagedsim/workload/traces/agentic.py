"""Agentic Mooncake: JSON Lines of calls by session or by what they wait for (aiperf, Dynamo)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import shown
from pagedsim.workload.traces.sessions import (
    Blocks,
    Call,
    Contents,
    Fields,
    Session,
    SessionFormat,
    Space,
    continued,
    in_order,
    lines_of,
    numbered,
)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line: its session, and the lines that it waits for."""

    of: Fields
    session: str
    waits: Sequence[int]
    continues: int | None
    """The line before it of its session."""


class Agentic(SessionFormat):
    """Mooncake's fields with a `session_id`, whose lines follow one another, each `delay` ms after
    the answer to the one before; or with a `request_id` and those to `wait_for` (Dynamo).

    `input_length` is the whole prompt. Equal `hash_ids` are equal blocks in the whole file.
    """

    name = "agentic"
    options = ("block_tokens",)

    def fits(self, head: str) -> float:
        def has(*names: str) -> bool:
            return all(f'"{name}"' in head for name in names)

        chained = has("delay") or has("wait_for") or has("session_id", "hash_ids")
        return 1.5 * (head.startswith("{") and has("input_length") and chained)

    def sessions(self, path: Path, **options: Any) -> Iterator[Session]:
        rows = _rows(path)
        block = options["block_tokens"]
        lengths = [row.of.tokens("input_length", 1) for row in rows]
        ids = numbered([
            row.of.blocks("hash_ids", length, block)
            for row, length in zip(rows, lengths, strict=True)
        ])  # fmt: skip
        space = Space()
        contents = Contents.of(space, block, ids)
        order = _order(rows)
        made = _calls(rows, order, lengths, ids, contents)
        groups = _groups(rows)
        found = []
        for _, members in groupby(sorted(order, key=groups.__getitem__), groups.__getitem__):
            found.append(_session([*members], rows, made, space, block))
        yield from sorted(found, key=lambda session: session.begin)


def _rows(path: Path) -> list[_Row]:
    lines = list(lines_of(path))
    names: dict[str, int] = {}
    for place, line in enumerate(lines):
        if name := line.text("request_id"):
            if name in names:
                raise line.wrong("request_id", f"unlike that of line {names[name] + 1}")
            names[name] = place
    rows, last = list[_Row](), dict[str, int]()
    for place, line in enumerate(lines):
        session = line.text("session_id") or f"line {place + 1}"
        before = last.get(session)
        last[session] = place
        wanted = line.values.get("wait_for")
        if wanted is not None:
            waits = [_named(line, name, names) for name in _listed(line, wanted)]
        else:
            explicit = line.values.get("request_id") is not None
            waits = [] if before is None or explicit else [before]
        rows.append(_Row(line, session, waits, before))
    return rows


def _listed(line: Fields, wanted: Any) -> list[Any]:
    if not isinstance(wanted, list):
        raise line.wrong("wait_for", "a list of request_ids")
    return wanted


def _named(line: Fields, name: Any, names: Mapping[str, int]) -> int:
    if str(name) not in names:
        raise ConfigError(f"{line.where}: wait_for={shown(name)}: no line has this request_id")
    return names[str(name)]


def _order(rows: Sequence[_Row]) -> list[int]:
    """Lines in an order in which each stands behind those that it waits for."""
    sorter = TopologicalSorter({place: row.waits for place, row in enumerate(rows)})
    try:
        return list(sorter.static_order())
    except CycleError as error:
        circle = [rows[place].of for place in error.args[1]]
        names = " after ".join(line.text("request_id") for line in reversed(circle))
        raise ConfigError(f"{circle[0].where}: wait_for: a cycle of calls: {names}") from None


def _calls(
    rows: Sequence[_Row],
    order: Sequence[int],
    lengths: Sequence[int],
    ids: Sequence[Blocks],
    contents: Contents,
) -> dict[int, Call]:
    """Calls by line, which wait for lines. A delay counts from the answers that a call waits for,
    and these take no time, since nothing says how long they took."""
    made: dict[int, Call] = {}
    for place in order:
        row, prompt = rows[place], lengths[place]
        delay = sum(
            row.of.optional_seconds(name, unit=1e-3) or 0.0 for name in ("delay", "tool_wait_ms")
        )
        stated = row.of.optional_seconds("timestamp", unit=1e-3)
        ready = max((made[other].at for other in row.waits), default=0.0)
        at = ready + delay if stated is None or (row.waits and delay) else max(stated, ready)
        before = None if row.continues is None else made.get(row.continues)
        if len(ids[place]):
            runs = contents.runs(ids[place], prompt)
        else:
            shared = before.prompt if before is not None and before.prompt <= prompt else 0
            runs = continued(before, shared, prompt, contents.space)
        output = max(row.of.tokens("output_length", 0), 1)
        made[place] = Call(at, at, None, prompt, output, *runs, tuple(row.waits), 0)
    return made


def _groups(rows: Sequence[_Row]) -> list[int]:
    """Of each line the first line of its session: lines of one name, or that wait for another."""
    parents = list(range(len(rows)))

    def root(place: int) -> int:
        while parents[place] != place:
            parents[place] = place = parents[parents[place]]
        return place

    for place, row in enumerate(rows):
        for other in (*row.waits, *(() if row.continues is None else (row.continues,))):
            parents[max(root(place), root(other))] = min(root(place), root(other))
    return list(map(root, range(len(rows))))


def _session(
    members: Sequence[int],
    rows: Sequence[_Row],
    made: Mapping[int, Call],
    space: Space,
    block: int,
) -> Session:
    place_of = {line: place for place, line in enumerate(members)}
    names = list(dict.fromkeys(rows[line].session for line in members))
    calls = []
    for line in members:
        after = tuple(place_of[other] for other in made[line].after)
        calls.append(replace(made[line], after=after, agent=names.index(rows[line].session)))
    begin, calls = in_order(calls)
    clocked = all(rows[line].of.values.get("timestamp") is not None for line in members)
    delayed = any(rows[line].of.values.get("delay") for line in members)
    return Session(
        name=names[0],
        calls=calls,
        space=space,
        block=block,
        begin=begin,
        clocked=clocked and not delayed,
        agents=len(names) - 1,
    )
