"""Sessions of coding agents, as kv-cache-tester records them: a JSON file for each.

https://github.com/callanjfox/kv-cache-tester, Apache-2.0; aiperf calls the format weka_trace. Other
formats of sessions that nest are put into its form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

from pagedsim.core import ConfigError
from pagedsim.core.errors import choices, shown
from pagedsim.workload.traces.sessions import (
    SOON,
    Call,
    Contents,
    Fields,
    Session,
    SessionFormat,
    in_order,
    numbered,
    whole_of,
)

SUBAGENT, ASYNC = "subagent", "async_launched"
"""Type of a sub-agent, and status of one that holds only what its parent calls after its end."""
MARKERS = ("start", "end")
"""What the time of a sub-agent's marker is: that of its begin, or of its return."""


class Agents(SessionFormat):
    """One session a file: blocks of `block_size` tokens by `hash_ids`, nested sub-agents."""

    name = "agents"

    def fits(self, head: str) -> bool:
        return bool(re.match(r"\{.*\"(hash_id_scope\"\s*:|requests\"\s*:\s*\[)", head, re.S))

    def sessions(self, path: Path, block_tokens: int, markers: str) -> Iterator[Session]:
        trace = whole_of(path)
        if (scope := trace.values.get("hash_id_scope", "local")) != "local":
            raise ConfigError(f"{path}: hash_id_scope={shown(scope)}: must be 'local'")
        block, name = trace.tokens("block_size", 1), trace.text("id") or path.name
        yield nested_session(trace, name, block, markers)


def nested_session(
    trace: Fields, name: str, block: int = 1, markers: str = "start", rootless: bool = False
) -> Session:
    """A session from its agent. A sub-agent without a call before it is left out, unless `rootless`
    sessions begin with it."""
    reader = _Reader(block, markers, rootless)
    reader.agent(trace, 0.0, ())
    if not reader.calls:
        raise ConfigError(f"{trace.where}: requests: holds no calls")
    return reader.session(name)


@dataclass
class _Reader:
    """Reads the calls of a session, agent by agent; a call stands behind those it waits for."""

    block: int
    markers: str
    rootless: bool
    calls: list[Call] = field(default_factory=list)
    """Without contents, since blocks are not numbered yet."""
    prompts: list[tuple[list[int], int | None, int | None]] = field(default_factory=list)
    """Names of blocks, the call that it goes on from, and how much of that it has."""
    firsts: list[tuple[int, int, int]] = field(default_factory=list)
    """First calls of agents, with the tokens of their tools and system prompts."""
    agents: int = 0
    orphans: int = 0
    late: int = 0

    def agent(self, of: Fields, marker: float, after: tuple[int, ...]) -> list[int]:
        """Read an agent, whose first call comes after those; returns the calls that end it.

        Its times count from `marker`, unless none of them is before it: then they are the
        session's.
        """
        number, before, waits = self.agents, list(after), list[int]()
        self.agents += 1
        entries = [(entry, entry.seconds("t")) for entry in of.objects("requests")]
        entries.sort(key=itemgetter(1))
        base = marker if min((at for _, at in entries), default=marker) + SOON < marker else 0.0
        later, last, sizes = list[tuple[float, list[int]]](), None, beginning(of)
        for entry, offset in entries:
            at = base + offset
            if entry.values.get("type") == SUBAGENT:
                if last is None and not self.rootless:
                    self.orphans += 1
                    continue
                end, ends = self._subagent(entry, at, tuple(before))
                later.append((end if entry.values.get("status") == ASYNC else 0.0, ends))
                continue
            waits = [place for end, ends in later if end <= at + SOON for place in ends]
            later = [(end, ends) for end, ends in later if end > at + SOON]
            self.late += any(self.calls[place].end > at + 1 for place in waits)
            call = self._call(entry, at, (*before, *waits), number, last)
            if last is None:
                self.firsts.append((call, *sizes))
            before, last = [call], call
        unmet = [place for end, ends in later if not end for place in ends]
        return [*(before if last is not None else ()), *unmet]

    def _subagent(
        self, entry: Fields, marker: float, after: tuple[int, ...]
    ) -> tuple[float, list[int]]:
        """Read a sub-agent; returns the time at which it returns, and the calls that end it."""
        lasts = entry.optional_seconds("duration_ms", unit=1e-3)
        if self.markers == "end" and lasts is not None:
            marker = max([marker - lasts, *(self.calls[place].end for place in after)])
        ends = self.agent(entry, marker, after)
        over = max([marker, *(self.calls[place].end for place in ends)])
        return over if lasts is None else marker + lasts, ends

    def _call(
        self, entry: Fields, at: float, after: tuple[int, ...], agent: int, last: int | None
    ) -> int:
        if (kind := entry.values.get("type")) not in ("n", "s"):
            what = choices(str(kind), ("n", "s", SUBAGENT))
            raise ConfigError(f"{entry.where}: type={shown(kind):.40}: no such kind; {what}")
        prompt, output = entry.tokens("in", 1), max(entry.tokens("out", 0), 1)
        think, end = entry.optional_seconds("think_time"), at + entry.seconds("api_time", 0.0)
        ids = entry.blocks("hash_ids", prompt, self.block)
        self.prompts.append((ids, last, entry.values.get("shared")))
        model = entry.text("model")
        self.calls.append(Call(at, end, think, prompt, output, (), (), after, agent, model))
        return len(self.calls) - 1

    def session(self, name: str) -> Session:
        ids = numbered([ids for ids, _, _ in self.prompts])
        contents = Contents.of(self.block, ids)
        for call, tools, system in self.firsts:
            contents.begins(ids[call], tools, system)
        for place, (blocks, (_, last, shared)) in enumerate(zip(ids, self.prompts, strict=True)):
            before = None if last is None or shared is None else self.calls[last]
            runs = contents.runs(blocks, self.calls[place].prompt, before, shared or 0)
            self.calls[place] = replace(self.calls[place], streams=runs[0], ends=runs[1])
        begin, calls = in_order(self.calls)
        return Session(
            name=name,
            calls=calls,
            space=contents.space,
            common=contents.common,
            block=self.block if any(map(len, ids)) else None,
            begin=begin,
            orphans=self.orphans,
            late=self.late,
            unknown=contents.unknown,
        )


def beginning(agent: Fields) -> tuple[int, int]:
    """Tokens of an agent's tools and of its system prompt."""
    return agent.tokens("tool_tokens", 0, 0), agent.tokens("system_tokens", 0, 0)
