"""Agentic Mooncake: JSON Lines of calls by session or by what they wait for (aiperf, Dynamo)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from pagedsim.core import ConfigError
from pagedsim.core.errors import shown
from pagedsim.workload.traces.sessions import (
    Call,
    Contents,
    Fields,
    Session,
    SessionFormat,
    in_order,
    lines_of,
    numbered,
)


class Agentic(SessionFormat):
    """Mooncake's fields with a `session_id`, whose lines follow one another, each `delay` ms after
    the answer to the one before; or with a `request_id` and those to `wait_for` (Dynamo).

    `input_length` is the whole prompt. Equal `hash_ids` are equal blocks in the whole file.
    """

    name = "agentic"

    def fits(self, head: str) -> bool:
        chained = re.search(r'"(delay|wait_for)"|"session_id"(?=.*"hash_ids")', head, re.S)
        return head.startswith("{") and '"input_length"' in head and chained is not None

    def sessions(self, path: Path, block_tokens: int, markers: str) -> Iterator[Session]:
        lines = list(lines_of(path))
        names = [line.text("session_id") or f"line {n}" for n, line in enumerate(lines, 1)]
        before, last = list[int | None](), dict[str, int]()
        for place, name in enumerate(names):
            before.append(last.get(name))
            last[name] = place
        waits = _waits(lines, before)
        calls, contents = _calls(lines, before, waits, block_tokens)
        groups, group_of = dict[int, list[int]](), _groups(before, waits)
        for place in calls:  # behind those that it waits for
            groups.setdefault(group_of[place], []).append(place)
        sessions = []
        for members in groups.values():
            begin, made = in_order(_renumbered(members, calls, names))
            values = [lines[place].values for place in members]
            timed = all(one.get("timestamp") is not None for one in values)
            sessions.append(
                Session(
                    name=names[members[0]],
                    calls=made,
                    space=contents.space,
                    block=block_tokens,
                    begin=begin,
                    clocked=timed and not any(one.get("delay") for one in values),
                )
            )
        yield from sorted(sessions, key=lambda session: session.begin)


def _waits(lines: Sequence[Fields], before: Sequence[int | None]) -> list[list[int]]:
    """The lines that each line waits for."""
    named: dict[str, int] = {}
    for place, line in enumerate(lines):
        if (name := line.text("request_id")) and named.setdefault(name, place) != place:
            raise line.wrong("request_id", f"unlike that of line {named[name] + 1}")
    waits = []
    for line, last in zip(lines, before, strict=True):
        wanted = line.values.get("wait_for")
        if wanted is None:
            waits.append([] if last is None or line.text("request_id") else [last])
            continue
        if not isinstance(wanted, list):
            raise line.wrong("wait_for", "a list of request_ids")
        for name in wanted:
            if str(name) not in named:
                what = f"wait_for={shown(name)}: no line has this request_id"
                raise ConfigError(f"{line.where}: {what}")
        waits.append([named[str(name)] for name in wanted])
    return waits


def _calls(
    lines: Sequence[Fields],
    before: Sequence[int | None],
    waits: Sequence[Sequence[int]],
    block: int,
) -> tuple[dict[int, Call], Contents]:
    """Calls by line, each behind those that it waits for. A delay counts from these answers, which
    take no time, since nothing says how long they took."""
    lengths = [line.tokens("input_length", 1) for line in lines]
    pairs = zip(lines, lengths, strict=True)
    ids = numbered([line.blocks("hash_ids", length, block) for line, length in pairs])
    contents, calls = Contents.of(block, ids), dict[int, Call]()
    for place in _order(lines, waits):
        line, prompt = lines[place], lengths[place]
        delay = line.seconds("delay", 0.0, 1e-3) + line.seconds("tool_wait_ms", 0.0, 1e-3)
        stated = line.optional_seconds("timestamp", 1e-3)
        ready = max((calls[other].at for other in waits[place]), default=0.0)
        at = ready + delay if stated is None or (waits[place] and delay) else max(stated, ready)
        last = before[place]
        previous = None if last is None else calls.get(last)
        grown = previous if previous is not None and previous.prompt <= prompt else None
        runs = contents.runs(ids[place], prompt, grown, prompt)
        output = max(line.tokens("output_length", 0), 1)
        calls[place] = Call(at, at, None, prompt, output, *runs, tuple(waits[place]), 0)
    return calls, contents


def _order(lines: Sequence[Fields], waits: Sequence[Sequence[int]]) -> list[int]:
    """Lines in an order in which each stands behind those that it waits for."""
    try:
        return list(TopologicalSorter(dict(enumerate(waits))).static_order())
    except CycleError as error:
        circle = [lines[place] for place in error.args[1]]
        names = " after ".join(line.text("request_id") for line in reversed(circle))
        raise ConfigError(f"{circle[0].where}: wait_for: a cycle of calls: {names}") from None


def _groups(before: Sequence[int | None], waits: Sequence[Sequence[int]]) -> list[int]:
    """Of each line the first line of its session: lines of one name, or that wait for another."""
    parents = list(range(len(before)))

    def root(place: int) -> int:
        while parents[place] != place:
            parents[place] = place = parents[parents[place]]
        return place

    for place, (last, others) in enumerate(zip(before, waits, strict=True)):
        for other in (*others, *([] if last is None else [last])):
            ends = root(place), root(other)
            parents[max(ends)] = min(ends)
    return list(map(root, range(len(before))))


def _renumbered(
    members: Sequence[int], calls: Mapping[int, Call], names: Sequence[str]
) -> list[Call]:
    """The calls of a session, where lines become places in it and names numbers of agents."""
    place_of = {line: place for place, line in enumerate(members)}
    number = {name: n for n, name in enumerate(dict.fromkeys(names[line] for line in members))}
    return [
        replace(
            calls[line],
            after=tuple(place_of[other] for other in calls[line].after),
            agent=number[names[line]],
        )
        for line in members
    ]
