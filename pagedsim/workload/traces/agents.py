"""Sessions of coding agents, as kv-cache-tester records them: a JSON file for each.

https://github.com/callanjfox/kv-cache-tester, Apache-2.0; aiperf calls the format weka_trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import choices, shown
from pagedsim.workload.traces.jsonlines import parsed
from pagedsim.workload.traces.rows import opened
from pagedsim.workload.traces.sessions import (
    SOON,
    Call,
    Contents,
    Fields,
    Session,
    SessionFormat,
    Space,
    in_order,
    numbered,
)

SUBAGENT = "subagent"
ASYNC = "async_launched"
"""Status of a sub-agent that its parent does not wait for at once."""
MARKERS = ("start", "end")
"""What the time of a sub-agent's marker is: that of its begin, or of its return."""


class Agents(SessionFormat):
    """One session a file: blocks of `block_size` tokens by `hash_ids`, nested sub-agents."""

    name = "agents"
    options = ("markers",)

    def fits(self, head: str) -> float:
        found = re.search(r'"hash_id_scope"\s*:|"requests"\s*:\s*\[', head)
        return 2.0 * bool(head.startswith("{") and found)

    def sessions(self, path: Path, **options: Any) -> Iterator[Session]:
        with opened(path) as file:
            trace = Fields.of(parsed(path, None, file.read()), str(path))
        if (scope := trace.values.get("hash_id_scope", "local")) != "local":
            raise ConfigError(f"{path}: hash_id_scope={shown(scope)}: must be 'local'")
        reader = _Reader(trace.tokens("block_size", 1), options.get("markers", "start"))
        reader.agent(trace, 0.0, ())
        if not reader.drafts:
            raise ConfigError(f"{path}: requests: holds no calls")
        yield reader.session(trace.text("id") or path.name)


@dataclass
class _Reader:
    """Reads the calls of a session, agent by agent; a call stands behind those it waits for."""

    block: int
    markers: str
    drafts: list[Call] = field(default_factory=list)
    """Calls without contents, whose blocks are not numbered yet."""
    blocks: list[list[int]] = field(default_factory=list)
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
        entries = list(of.objects("requests"))
        times = [entry.seconds("t") for entry in entries]
        base = marker if times and min(times) + SOON < marker else 0.0
        later, began, sizes = list[tuple[float, list[int]]](), False, self._beginning(of)
        for at, entry in zip(times, entries, strict=True):
            if entry.values.get("type") == SUBAGENT:
                if not began:
                    self.orphans += 1
                    continue
                end, last = self._subagent(entry, base + at, before[-1])
                if entry.values.get("status") == ASYNC:
                    later.append((end, last))
                else:
                    waits += last
                continue
            ready = [last for end, last in later if end <= base + at + SOON]
            later = [(end, last) for end, last in later if end > base + at + SOON]
            waits += [place for last in ready for place in last]
            self.late += any(self.drafts[place].end > base + at + 1 for place in waits)
            call = self._call(entry, base + at, (*before, *waits), number)
            if not began:
                self.firsts.append((call, *sizes))
            before, waits, began = [call], [], True
        return [*(before if began else ()), *waits]

    def _beginning(self, of: Fields) -> tuple[int, int]:
        return of.tokens("tool_tokens", 0, 0), of.tokens("system_tokens", 0, 0)

    def _subagent(self, entry: Fields, marker: float, before: int) -> tuple[float, list[int]]:
        """Read a sub-agent; returns the time at which it returns, and the calls that end it."""
        lasts = entry.optional_seconds("duration_ms", unit=1e-3)
        if self.markers == "end" and lasts is not None:
            marker = max(marker - lasts, self.drafts[before].end)
        last = self.agent(entry, marker, (before,))
        ends = [self.drafts[place].end for place in last]
        return max([marker, *ends]) if lasts is None else marker + lasts, last

    def _call(self, entry: Fields, at: float, after: tuple[int, ...], agent: int) -> int:
        if (kind := entry.values.get("type")) not in ("n", "s"):
            what = choices(str(kind), ("n", "s", SUBAGENT))
            raise ConfigError(f"{entry.where}: type={shown(kind):.40}: no such kind; {what}")
        prompt, output = entry.tokens("in", 1), max(entry.tokens("out", 0), 1)
        think = entry.optional_seconds("think_time")
        end = at + entry.seconds("api_time", default=0.0)
        self.blocks.append(entry.blocks("hash_ids", prompt, self.block))
        model = entry.text("model")
        self.drafts.append(Call(at, end, think, prompt, output, (), (), after, agent, model))
        return len(self.drafts) - 1

    def session(self, name: str) -> Session:
        ids, space = numbered(self.blocks), Space()
        contents = Contents.of(space, self.block, ids)
        for call, tools, system in self.firsts:
            contents.begins(ids[call], tools, system)
        calls = []
        for draft, blocks in zip(self.drafts, ids, strict=True):
            streams, ends = contents.runs(blocks, draft.prompt)
            calls.append(replace(draft, streams=streams, ends=ends))
        begin, calls = in_order(calls)
        return Session(
            name=name,
            calls=calls,
            begin=begin,
            space=space,
            common=contents.common,
            block=self.block,
            orphans=self.orphans,
            late=self.late,
            agents=self.agents - 1,
            unknown=sum(
                not len(blocks) and draft.prompt >= self.block
                for blocks, draft in zip(ids, self.drafts, strict=True)
            ),
        )
