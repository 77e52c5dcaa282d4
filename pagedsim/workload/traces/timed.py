"""Sessions whose calls are known by their times: TraceLab's rounds, and OpenTelemetry's spans.

Neither says what prompts hold. A call's prompt begins with so many tokens of the one before it of
the same agent as the record says were cached, or else with all of them. Sub-agents begin after the
last call that their parent made before, and hold the first that it made after they had returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import shown
from pagedsim.workload.limits import LONGEST
from pagedsim.workload.traces.agents import ASYNC, SUBAGENT, nested_session
from pagedsim.workload.traces.rows import opened
from pagedsim.workload.traces.sessions import (
    Fields,
    Session,
    SessionFormat,
    from_zero,
    lines_of,
    whole_of,
)

Entry = dict[str, Any]


@dataclass
class Agent:
    """An agent from when to when its parent let it run; its calls as format agents has them."""

    begin: float
    end: float
    calls: list[Entry] = field(default_factory=list)
    below: list[Agent] = field(default_factory=list)

    def call(
        self, at: float, end: float, prompt: int, output: int, shared: int | None, model: str
    ) -> None:
        """Add a call; `shared`: tokens of the prompt before it, None: all, if it is no shorter."""
        self.calls.append(
            {"t": at, "type": "n", "api_time": end - at, "in": max(prompt, 1), "out": output}
            | {"shared": shared, "model": model}
        )

    def entry(self) -> Entry:
        calls = sorted(self.calls, key=lambda call: float(call["t"]))
        for before, call in zip([None, *calls], calls, strict=False):
            ended = call["t"] if before is None else before["t"] + before["api_time"]
            call["think_time"] = max(call["t"] - ended, 0.0)
            if call["shared"] is None:
                grows = before is not None and before["in"] <= call["in"]
                call["shared"] = before["in"] if before is not None and grows else 0
        nested = [agent.entry() for agent in self.below]
        entries = sorted([*calls, *nested], key=lambda entry: float(entry["t"]))
        lasts = (self.end - self.begin) * 1e3
        return {"type": SUBAGENT, "status": ASYNC, "t": self.begin, "duration_ms": lasts} | {
            "requests": [entry | {"t": max(entry["t"], self.begin)} for entry in entries]
        }

    def session(self, name: str) -> Session:
        return nested_session(Fields(self.entry(), name), name, rootless=True)


# -- TraceLab --------------------------------------------------------------------------------------

INPUTS, OUTPUTS = ("user_message", "tool_result"), ("text", "reasoning", "tool_call")
"""Events before which a round cannot have been sent, and those of its answer."""
SPAWNS = ("Agent", "Task")
"""Tools of Claude Code that are sub-agents, and last as long as they do."""
SHORTEST = 10.0
"""Seconds of a call of such a tool that may have run one."""


class TraceLab(SessionFormat):
    """TraceLab (uw-syfi): JSON Lines, one round of a session each.

    Sub-agents are sessions of their own there: one of the same user and project that lies within a
    call of a tool that runs sub-agents is taken for that call's, of the shortest such call.
    """

    name = "tracelab"

    def fits(self, head: str) -> bool:
        names = ("session_id", "round_index", "prefix_tokens")
        return all(f'"{name}"' in head.partition("\n")[0] for name in names)

    def sessions(self, path: Path, block_tokens: int, markers: str) -> Iterator[Session]:
        rows: dict[str, list[Fields]] = {}
        for row in lines_of(path):
            if not (name := row.text("session_id")):
                raise row.wrong("session_id", "a name")
            rows.setdefault(name, []).append(row)
        windows: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
        for name, rounds in rows.items():
            of_user = windows.setdefault(_whose(rounds), [])
            of_user += [(*window, name) for window in _windows(rounds)]
        agents, undated, parents = dict[str, Agent](), dict[str, int](), dict[str, str]()
        for name, rounds in rows.items():
            moments = [at for row in rounds for at in (*_events(row), *chain(*_tools(row)))]
            agents[name] = agent = Agent(min(moments, default=0.0), max(moments, default=0.0))
            undated[name] = sum(not _add_round(agent, row) for row in rounds)
        for name, agent in agents.items():
            if fitting := [
                window
                for window in windows[_whose(rows[name])]
                if window[0] <= agent.begin <= agent.end <= window[1]
                and agent.calls
                and name not in _line(window[2], parents)
            ]:
                begin, end, parents[name] = min(fitting, key=lambda one: one[1] - one[0])
                agents[name] = replace(agent, begin=begin, end=end)
        for name, parent in parents.items():
            agents[parent].below.append(agents[name])
            undated[[*_line(name, parents)][-1]] += undated[name]
        yield from from_zero([
            replace(agent.session(name), undated=undated[name])
            for name, agent in agents.items()
            if name not in parents and (agent.calls or agent.below)
        ])  # fmt: skip


def _whose(rows: Sequence[Fields]) -> tuple[str, str]:
    return rows[0].text("user"), rows[0].text("project")


def _line(name: str | None, parents: Mapping[str, str]) -> Iterator[str]:
    """A session and those above it."""
    while name is not None:
        yield name
        name = parents.get(name)


def _add_round(agent: Agent, row: Fields) -> bool:
    """Add a round; returns whether anything says when it was."""
    came, said = _events(row, INPUTS), _events(row, OUTPUTS)
    if not came and not said:
        return False
    at = max(came) if came else min(said)
    output = row.tokens("output_tokens", 0, 0) + row.tokens("reasoning_output_tokens", 0, 0)
    prompt, shared = row.tokens("input_tokens_total", 0), row.tokens("prefix_tokens", 0, 0)
    agent.call(at, max([at, *said]), prompt, output, shared, row.text("model"))
    return True


def _events(row: Fields, kinds: Sequence[str] = ()) -> list[float]:
    """The times of a round's events of these kinds, or of all."""
    return [
        _moment(event, "timestamp")
        for event in row.objects("timing_events", required=False)
        if event.values.get("timestamp") and (not kinds or event.text("event_type") in kinds)
    ]


def _tools(row: Fields, kinds: Sequence[str] = ()) -> list[list[float]]:
    """When a round's tools were called and answered."""
    return [
        [_moment(tool, name) for name in ("emitted_at", "result_at") if tool.values.get(name)]
        for tool in row.objects("tools", required=False)
        if not kinds or tool.text("tool_name") in kinds
    ]


def _windows(rounds: Sequence[Fields]) -> Iterator[tuple[float, float]]:
    """When a session may have run sub-agents: Claude Code's tools block, one window each; Codex
    begins sub-agents and waits for them later, which makes one window of all."""
    for row in rounds:
        for times in _tools(row, SPAWNS):
            if len(times) == 2 and times[1] - times[0] >= SHORTEST:
                yield times[0], times[1]
    begun = [times[0] for row in rounds for times in _tools(row, ["spawn_agent"]) if times]
    waited = [times[-1] for row in rounds for times in _tools(row, ["wait_agent"]) if times]
    if begun and waited:
        yield min(begun), max(waited)


def _moment(row: Fields, name: str) -> float:
    """Seconds of a date since 1970, by UTC unless it has a zone."""
    try:
        date = datetime.fromisoformat(row.text(name))
    except ValueError:
        raise row.wrong(name, "a date such as 2026-01-31T12:00:00Z") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


# -- OpenTelemetry ---------------------------------------------------------------------------------

AGENT = "invoke_agent"
CALLS = ("chat", "text_completion", "generate_content")
"""Operations that call a model."""
Key = tuple[str, str]
"""A trace and a span of it."""


@dataclass(frozen=True)
class _Span:
    of: Fields
    key: Key
    parent: Key | None
    begin: float
    end: float
    attributes: Mapping[str, Any]

    @property
    def operation(self) -> Any:
        return self.attributes.get("gen_ai.operation.name")

    def tokens(self, name: str, default: int | None = None) -> int:
        value = self.attributes.get(f"gen_ai.usage.{name}", default)
        if type(value) is not int or not 0 <= value <= LONGEST:
            what = f"gen_ai.usage.{name}={shown(value)}: must be a whole number of tokens"
            raise ConfigError(f"{self.of.where}: {what}")
        return value


class OpenTelemetry(SessionFormat):
    """OpenTelemetry's spans of generative AI, as OTLP has them in JSON, one object or one a line.

    A session is a `gen_ai.conversation.id`, or else a trace; a sub-agent is a span `invoke_agent`
    within another.
    """

    name = "otel"

    def fits(self, head: str) -> bool:
        return head.startswith("{") and '"resourceSpans"' in head

    def sessions(self, path: Path, block_tokens: int, markers: str) -> Iterator[Session]:
        spans = {span.key: span for span in _spans(path)}
        agents: dict[tuple[str, Key | None], Agent] = {}
        for span in sorted(spans.values(), key=lambda span: span.begin):
            if span.operation not in CALLS:
                continue
            above = list(_above(span, spans))
            names = (
                str(one.attributes.get("gen_ai.conversation.id", "")) for one in (span, *above)
            )
            name = next(filter(None, names), span.key[0])
            agent = agents.setdefault((name, None), Agent(span.begin, span.end))
            nested = [one for one in above if one.operation == AGENT][:-1]
            for one in reversed(nested):  # from the outermost
                if (name, one.key) not in agents:
                    agents[name, one.key] = Agent(one.begin, one.end)
                    agent.below.append(agents[name, one.key])
                agent = agents[name, one.key]
            _add_span(agent, span)
        roots = [(name, agent) for (name, key), agent in agents.items() if key is None]
        yield from from_zero([agent.session(name) for name, agent in roots])


def _add_span(agent: Agent, span: _Span) -> None:
    cached = "cache_read.input_tokens"
    shared = span.tokens(cached) if f"gen_ai.usage.{cached}" in span.attributes else None
    sizes = span.tokens("input_tokens"), span.tokens("output_tokens", 0)
    model = span.attributes.get("gen_ai.request.model", "")
    agent.call(span.begin, span.end, *sizes, shared, str(model))


def _above(span: _Span, spans: Mapping[Key, _Span]) -> Iterator[_Span]:
    """The spans around a span, from the nearest."""
    seen = {span.key}
    while span.parent is not None:
        where = f"{span.of.where}: parentSpanId={span.parent[1]!r}"
        if span.parent not in spans:
            raise ConfigError(f"{where}: there is no such span in the file")
        if span.parent in seen:
            raise ConfigError(f"{where}: a cycle of spans")
        span = spans[span.parent]
        seen.add(span.key)
        yield span


def _spans(path: Path) -> Iterator[_Span]:
    with opened(path) as file:
        first = file.readline().strip() or file.readline().strip()
    for value in lines_of(path) if first.endswith("}") else [whole_of(path)]:
        for resource in value.objects("resourceSpans"):
            for scope in resource.objects("scopeSpans"):
                for span in scope.objects("spans"):
                    yield _span(span)


def _span(span: Fields) -> _Span:
    trace, parent = span.text("traceId"), span.text("parentSpanId")
    begin, end = (
        _whole(span, f"{name}TimeUnixNano", span.values.get(f"{name}TimeUnixNano")) / 1e9
        for name in ("start", "end")
    )
    attributes = {
        entry.text("key"): _value(entry) for entry in span.objects("attributes", required=False)
    }
    key, above = (trace, span.text("spanId")), (trace, parent) if parent else None
    return _Span(span, key, above, begin, max(begin, end), attributes)


def _value(entry: Fields) -> Any:
    """The value of an attribute."""
    value = entry.values.get("value")
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, held),) = value.items()
    return _whole(entry, "value", held) if kind == "intValue" else held


def _whole(of: Fields, name: str, value: Any) -> int:
    """A whole number, which OTLP has as a text."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise of.wrong(name, "a whole number") from None
