"""Sessions whose calls are known by their times: TraceLab's rounds, and OpenTelemetry's spans.

Neither says what prompts hold. A call's prompt begins with so many tokens of the one before it of
the same agent as the record says were cached, or else with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import shown
from pagedsim.workload.limits import LONGEST
from pagedsim.workload.traces.jsonlines import parsed
from pagedsim.workload.traces.rows import opened
from pagedsim.workload.traces.sessions import (
    SOON,
    Call,
    Fields,
    Session,
    SessionFormat,
    Space,
    continued,
    in_order,
    lines_of,
)


@dataclass
class Agent:
    """An agent of a session: its parent's number, and from when to when its parent let it run."""

    parent: int | None = None
    begin: float = 0.0
    end: float = 0.0
    calls: list[int] = field(default_factory=list)
    returned: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """A call by its times."""

    agent: int
    at: float
    end: float
    prompt: int
    output: int
    shared: int | None
    """Tokens of its prompt that the one before has, too; None: all of that, unless it is longer."""
    model: str


def linked(agents: Sequence[Agent], timed: Iterable[Timed], space: Space) -> list[Call]:
    """Calls that wait for what had ended when they began: the call before them of their agent, and
    sub-agents that had returned; an agent's first call waits for its parent's last."""
    calls, prompts = list[Call](), dict[int, Call]()
    for call in sorted(timed, key=lambda call: (call.at, call.end)):
        agent, waits = agents[call.agent], list[int]()
        ended = [place for place in agent.calls if calls[place].end <= call.at + SOON]
        if ended:
            waits.append(max(ended, key=lambda place: calls[place].end))
        elif agent.parent is not None:
            before = [p for p in agents[agent.parent].calls if calls[p].at <= agent.begin + SOON]
            waits += before[-1:]
        for other in agents:
            if other.parent == call.agent and not other.returned and other.end <= call.at + SOON:
                other.returned = True
                waits += _last(other, calls)
        previous = prompts.get(call.agent)
        shared = call.shared
        if shared is None:
            shared = previous.prompt if previous and previous.prompt <= call.prompt else 0
        runs = continued(previous, shared, call.prompt, space)
        think = None if not ended else max(call.at - calls[waits[0]].end, 0.0)
        sizes = (call.prompt, call.output)
        made = Call(call.at, call.end, think, *sizes, *runs, tuple(waits), call.agent, call.model)
        prompts[call.agent] = made
        agent.calls.append(len(calls))
        calls.append(made)
    return calls


def _last(agent: Agent, calls: Sequence[Call]) -> list[int]:
    """Calls of an agent that none of its others waits for."""
    waited = {place for call in agent.calls for place in calls[call].after}
    return [place for place in agent.calls if place not in waited]


def _session(
    name: str, agents: Sequence[Agent], timed: Sequence[Timed], undated: int = 0
) -> Session:
    space = Space()
    begin, calls = in_order(linked(agents, timed, space))
    return Session(
        name=name,
        calls=calls,
        space=space,
        begin=begin,
        agents=len(agents) - 1,
        undated=undated,
    )


def _from_zero(sessions: list[Session]) -> Iterator[Session]:
    """Sessions by time, the first of which begins at 0."""
    first = min((session.begin for session in sessions), default=0.0)
    for session in sorted(sessions, key=lambda session: session.begin):
        yield replace(session, begin=session.begin - first)


# -- TraceLab --------------------------------------------------------------------------------------

INPUTS, OUTPUTS = ("user_message", "tool_result"), ("text", "reasoning", "tool_call")
"""Events before which a round cannot have been sent, and those of its answer."""
SPAWNS = ("Agent", "Task")
"""Tools of Claude Code that are sub-agents, and last as long as they do."""
SHORTEST = 10.0
"""Seconds of a call of such a tool that may have run one."""


@dataclass(frozen=True, slots=True)
class _Window:
    """When a session may have run a sub-agent."""

    owner: str
    begin: float
    end: float


class TraceLab(SessionFormat):
    """TraceLab (uw-syfi): JSON Lines, one round of a session each.

    Sub-agents are sessions of their own there: one of the same user and project that lies within a
    call of a tool that runs sub-agents is taken for that call's, of the shortest such call.
    """

    name = "tracelab"

    def fits(self, head: str) -> float:
        names = ("session_id", "round_index", "prefix_tokens")
        return 2.0 * all(f'"{name}"' in head.partition("\n")[0] for name in names)

    def sessions(self, path: Path, **options: Any) -> Iterator[Session]:
        rows: dict[str, list[Fields]] = {}
        for row in lines_of(path):
            if not (name := row.text("session_id")):
                raise row.wrong("session_id", "a name")
            rows.setdefault(name, []).append(row)
        parents = _parents(rows)
        trees: dict[str, list[str]] = {}
        for name in rows:
            root = name
            while root in parents:
                root = parents[root].owner
            trees.setdefault(root, []).append(name)
        made = []
        for root, names in trees.items():
            names.sort(key=root.__ne__)  # the root is agent 0
            number = {name: place for place, name in enumerate(names)}
            agents = [Agent()]
            for name in names[1:]:
                window = parents[name]
                agents.append(Agent(number[window.owner], window.begin, window.end))
            rounds = [_round(row, number[name]) for name in names for row in rows[name]]
            dated = [one for one in rounds if one is not None]
            if dated:
                made.append(_session(root, agents, dated, len(rounds) - len(dated)))
        yield from _from_zero(made)


def _round(row: Fields, agent: int) -> Timed | None:
    """A round; None where nothing says when it was."""
    stamps: dict[str, list[float]] = {}
    for event in row.objects("timing_events") if row.values.get("timing_events") else ():
        if event.values.get("timestamp"):
            stamps.setdefault(event.text("event_type"), []).append(_moment(event, "timestamp"))
    came = [at for kind in INPUTS for at in stamps.get(kind, ())]
    said = [at for kind in OUTPUTS for at in stamps.get(kind, ())]
    if not came and not said:
        return None
    at = max(came) if came else min(said)
    output = row.tokens("output_tokens", 0, 0) + row.tokens("reasoning_output_tokens", 0, 0)
    prompt = max(row.tokens("input_tokens_total", 0), 1)
    shared = row.tokens("prefix_tokens", 0, 0)
    end = max([at, *said])
    return Timed(agent, at, end, prompt, max(output, 1), shared, row.text("model"))


def _moment(row: Fields, name: str) -> float:
    """Seconds of a date since 1970, by UTC unless it has a zone."""
    try:
        date = datetime.fromisoformat(row.text(name))
    except ValueError:
        raise row.wrong(name, "a date such as 2026-01-31T12:00:00Z") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _parents(rows: Mapping[str, Sequence[Fields]]) -> dict[str, _Window]:
    """Sub-agents, each with the window in which its parent ran it."""
    spans, windows = dict[str, tuple[float, float]](), list[_Window]()
    for name, rounds in rows.items():
        stamps, found = _stamps(name, rounds)
        windows += found
        if stamps:
            spans[name] = min(stamps), max(stamps)
    parents: dict[str, _Window] = {}
    for name, (begin, end) in spans.items():
        whose = _whose(rows[name][0])
        fits = [
            window
            for window in windows
            if window.begin <= begin
            and end <= window.end
            and whose == _whose(rows[window.owner][0])
            and not _below(window.owner, name, parents)
        ]
        if fits:
            parents[name] = min(fits, key=lambda window: window.end - window.begin)
    return parents


def _whose(row: Fields) -> tuple[str, str]:
    return row.text("user"), row.text("project")


def _below(name: str | None, other: str, parents: Mapping[str, _Window]) -> bool:
    """Whether a session is another, or below it."""
    while name is not None and name != other:
        name = parents[name].owner if name in parents else None
    return name == other


def _stamps(name: str, rounds: Sequence[Fields]) -> tuple[list[float], list[_Window]]:
    """All times of a session, and its windows: Claude Code's tools block, one window each; Codex
    begins sub-agents and waits for them later, which makes one window of all."""
    stamps, windows, begun, waited = list[float](), list[_Window](), list[float](), list[float]()
    for row in rounds:
        for event in row.objects("timing_events") if row.values.get("timing_events") else ():
            if event.values.get("timestamp"):
                stamps.append(_moment(event, "timestamp"))
        for tool in row.objects("tools") if row.values.get("tools") else ():
            kind, both = tool.text("tool_name"), ("emitted_at", "result_at")
            times = [_moment(tool, key) for key in both if tool.values.get(key)]
            stamps += times
            if kind == "spawn_agent":
                begun += times[:1]
            elif kind == "wait_agent":
                waited += times[-1:]
            elif kind in SPAWNS and len(times) == 2 and times[1] - times[0] >= SHORTEST:
                windows.append(_Window(name, *times))
    if begun and waited and min(begun) < max(waited):
        windows.append(_Window(name, min(begun), max(waited)))
    return stamps, windows


# -- OpenTelemetry ---------------------------------------------------------------------------------

AGENT = "invoke_agent"
CALLS = ("chat", "text_completion", "generate_content")
"""Operations that call a model."""


@dataclass(frozen=True, slots=True)
class _Span:
    where: str
    key: tuple[str, str]
    parent: tuple[str, str] | None
    begin: float
    end: float
    attributes: Mapping[str, Any]

    @property
    def operation(self) -> Any:
        return self.attributes.get("gen_ai.operation.name")

    def tokens(self, name: str, default: int | None = None) -> int:
        value = self.attributes.get(name, default)
        if type(value) is not int or not 0 <= value <= LONGEST:
            given = f"{name}={shown(value)}" if name in self.attributes else f"no {name}"
            raise ConfigError(f"{self.where}: {given}: must be a whole number of tokens")
        return value


class OpenTelemetry(SessionFormat):
    """OpenTelemetry's spans of generative AI, as OTLP has them in JSON, one object or one a line.

    A session is a `gen_ai.conversation.id`, or else a trace; an agent is a span `invoke_agent`
    within another.
    """

    name = "otel"

    def fits(self, head: str) -> float:
        return 2.0 * (head.startswith("{") and '"resourceSpans"' in head)

    def sessions(self, path: Path, **options: Any) -> Iterator[Session]:
        spans = {span.key: span for span in _spans(path)}
        first = min((span.begin for span in spans.values()), default=0.0)
        agents: dict[str, dict[tuple[str, str] | None, int]] = {}
        made: dict[str, list[Agent]] = {}
        timed: dict[str, list[Timed]] = {}
        for span in spans.values():
            if span.operation not in CALLS:
                continue
            above = list(_above(span, spans))
            name = next(filter(None, map(_conversation, [span, *above])), span.key[0])
            numbers = agents.setdefault(name, {None: 0})
            nested = made.setdefault(name, [Agent()])
            chain = [one for one in above if one.operation == AGENT][:-1]
            parent = 0
            for agent in reversed(chain):  # from the outermost
                if agent.key not in numbers:
                    numbers[agent.key] = len(nested)
                    nested.append(Agent(parent, agent.begin - first, agent.end - first))
                parent = numbers[agent.key]
            timed.setdefault(name, []).append(_timed(span, parent, first))
        yield from _from_zero([_session(name, made[name], timed[name]) for name in timed])


def _timed(span: _Span, agent: int, first: float) -> Timed:
    cached = "gen_ai.usage.cache_read.input_tokens"
    shared = span.tokens(cached) if cached in span.attributes else None
    model = span.attributes.get("gen_ai.request.model", "")
    prompt = max(span.tokens("gen_ai.usage.input_tokens"), 1)
    output = max(span.tokens("gen_ai.usage.output_tokens", 0), 1)
    begin, end = span.begin - first, span.end - first
    return Timed(agent, begin, end, prompt, output, shared, str(model))


def _conversation(span: _Span) -> str:
    return str(span.attributes.get("gen_ai.conversation.id", ""))


def _above(span: _Span, spans: Mapping[tuple[str, str], _Span]) -> Iterator[_Span]:
    """The spans around a span, from the nearest."""
    seen, at = {span.key}, span
    while at.parent is not None:
        if (parent := spans.get(at.parent)) is None:
            raise ConfigError(
                f"{at.where}: parentSpanId={at.parent[1]!r}: there is no such span in the file"
            )
        if parent.key in seen:
            raise ConfigError(f"{at.where}: parentSpanId={at.parent[1]!r}: a cycle of spans")
        seen.add(parent.key)
        at = parent
        yield at


def _spans(path: Path) -> Iterator[_Span]:
    with opened(path) as file:
        text = file.read().strip()
    try:
        objects = [json.loads(text)]
    except (ValueError, RecursionError):  # one a line, or an error that says where
        objects = [parsed(path, n, line) for n, line in enumerate(text.splitlines(), 1) if line]
    for number, value in enumerate(objects):
        for resource in Fields.of(value, f"{path}: object {number}").objects("resourceSpans"):
            for scope in resource.objects("scopeSpans"):
                for span in scope.objects("spans"):
                    yield _span(span)


def _span(span: Fields) -> _Span:
    trace, begin = span.text("traceId"), _nanoseconds(span, "startTimeUnixNano")
    end = max(_nanoseconds(span, "endTimeUnixNano"), begin)
    parent = span.text("parentSpanId")
    listed = span.objects("attributes") if span.values.get("attributes") else ()
    attributes = {entry.text("key"): _value(entry) for entry in listed}
    key, above = (trace, span.text("spanId")), (trace, parent) if parent else None
    return _Span(span.where, key, above, begin, end, attributes)


def _nanoseconds(span: Fields, name: str) -> float:
    value = span.values.get(name)
    try:
        return int(value) / 1e9  # type: ignore[arg-type]  # a text, since JSON's numbers are short
    except (TypeError, ValueError):
        raise span.wrong(name, "a whole number of nanoseconds") from None


def _value(entry: Fields) -> Any:
    """The value of an attribute; whole numbers are texts in OTLP."""
    value = entry.values.get("value")
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, held),) = value.items()
    try:
        return int(held) if kind == "intValue" else held
    except (TypeError, ValueError):
        raise entry.wrong("value", "a whole number") from None
