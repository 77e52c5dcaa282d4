"""Workloads of sessions: multi-turn chats, and agents with sequential and parallel LLM calls.

The shape of a session is a chain of turns, map-reduce, or a tree of parallel calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_flag, require_number, require_whole
from pagedsim.workload.arrivals import Arrivals, ClosedLoop, Source, Timed, make_arrivals, merge
from pagedsim.workload.draws import (
    Draw,
    Labelled,
    Labels,
    SharedPrefixes,
    make_draw,
    make_prefixes,
    pick,
    stream,
    weights_of,
)
from pagedsim.workload.lengths import Lengths, make_lengths
from pagedsim.workload.limits import LONGEST, MOST, make, notice, refuse_late, within
from pagedsim.workload.tokens import GrowingPrompts
from pagedsim.workload.workload import Sessions, Workload


class Call(NamedTuple):
    """One request of a session; refers to earlier requests by their index in the session."""

    turn: int  # from 1; calls of one turn run in parallel
    after: tuple[int, ...] = ()  # calls whose answers it waits for
    base: int = -1  # the call whose conversation it continues; -1: a new conversation
    asks: int | None = None  # the call with the same question in the same conversation
    quotes: tuple[int, ...] = ()  # calls whose answers are part of its question


Calls = Sequence[Call]


class Shape(ABC):
    """The structure of a session."""

    drawn = False
    """Whether it is random."""

    @abstractmethod
    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        """The calls of `count` sessions, by turn; a smaller count gives a prefix of a larger."""


class Chain(Shape):
    """Sequential calls, each with the whole conversation as its prompt: a chat or ReAct agent."""

    def __init__(self, turns: float | Mapping[str, Any] | Draw) -> None:
        self.turns = make_draw("turns", turns)
        self.drawn = self.turns.drawn

    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        return [
            [Call(1), *(Call(turn + 1, (turn - 1,), turn - 1) for turn in range(1, turns))]
            for turns in self.turns.counts(count, rng).tolist()
        ]


class MapReduce(Shape):
    """`width` parallel calls, and one call with all their answers in its prompt."""

    def __init__(self, width: float | Mapping[str, Any] | Draw) -> None:
        self.width = make_draw("width", width)
        self.drawn = self.width.drawn

    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        drafts: list[Calls] = []
        for width in self.width.counts(count, rng).tolist():
            parts = tuple(range(width))
            drafts.append([*(Call(1) for _ in parts), Call(2, parts, quotes=parts)])
        return drafts


@dataclass(frozen=True)
class Tree(Shape):
    """Tree of thoughts: `breadth` answers to a question, of which the best `keep` are expanded
    likewise down to `depth`, and a final answer that continues the best."""

    breadth: int
    depth: int
    keep: int = 1

    def __post_init__(self) -> None:
        require_whole("breadth", self.breadth, 1, 64)
        require_whole("depth", self.depth, 1, 64)
        require_whole("keep", self.keep, 1, self.breadth)

    def sessions(self, count: int, rng: np.random.Generator) -> list[Calls]:
        calls, last, kept = list[Call](), tuple[int, ...](), [-1]
        for level in range(self.depth):
            begin = len(calls)
            for base in kept:
                first = len(calls)
                calls += [Call(level + 1, last, base, first) for _ in range(self.breadth)]
            last = tuple(range(begin, len(calls)))
            kept = [last[place] for place in range(self.keep)]  # no scores: the first are kept
        calls.append(Call(self.depth + 1, last, kept[0]))
        return [calls] * count


SHAPES: Mapping[str, Callable[..., Shape]] = {
    "chain": Chain,
    "map_reduce": MapReduce,
    "tree": Tree,
}


Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One class of sessions.

    `lengths` are the new prompt tokens and the output tokens of a turn, `pause` is the time between
    an answer and the next turn, `share` the fraction of all sessions.
    """

    name: str = ""
    shape: Shape
    lengths: Lengths
    pause: Draw
    prefixes: SharedPrefixes | None = None
    labels: Labels = field(default_factory=Labels)
    share: float = 1.0

    @property
    def drawn(self) -> bool:
        parts = (self.shape.drawn, self.lengths.drawn, self.pause.drawn, self.labels.drawn)
        return any(parts) or self.prefixes is not None

    def drafts(self, arrival: Floats, seed: int) -> list[_Draft]:
        """Sample one session per arrival."""
        draw = partial(stream, seed, owner=self.name)
        calls = self.shape.sessions(len(arrival), draw("turns"))
        ends = np.cumsum([len(some) for some in calls]).tolist()
        rows = ends[-1] if ends else 0
        asked, said = (column.tolist() for column in self.lengths.sample(rows, draw("lengths")))
        pauses = self.pause.sample(rows, draw("pauses")).tolist()
        prefixes, tokens = [-1] * len(arrival), 0
        if self.prefixes is not None:
            prefixes = self.prefixes.sample(len(arrival), draw("prompts")).tolist()
            tokens = self.prefixes.tokens
        spans = (slice(end - len(some), end) for some, end in zip(calls, ends, strict=True))
        return [
            _Draft(some, asked[span], said[span], pauses[span], prefix, tokens)
            for some, span, prefix in zip(calls, spans, prefixes, strict=True)
        ]

    def labelled(self, arrival: Floats, seed: int) -> Labelled:
        """Attributes of the sessions; all requests of a session share them."""
        return self.labels.draw(arrival, partial(stream, seed, owner=self.name))


@dataclass(frozen=True)
class _Draft:
    """Samples of one session."""

    calls: Calls
    asked: Sequence[int]
    said: Sequence[int]
    pauses: Sequence[float]
    prefix: int
    prefix_len: int


@dataclass
class _Rows:
    """Columns of the requests, session by session."""

    max_len: int | None
    session: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    asks: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    prefix_len: list[int] = field(default_factory=list)
    prompt_len: list[int] = field(default_factory=list)
    output_len: list[int] = field(default_factory=list)
    sessions: int = 0
    clipped: int = 0
    ended: int = 0  # sessions whose next turn would have exceeded max_len

    def add(self, draft: _Draft, first_prefix: int) -> None:
        """Append the requests of a session, up to the turn that would exceed `max_len`."""
        begin, number = len(self.turn), self.sessions
        self.sessions += 1
        for place, call in enumerate(draft.calls):
            prompt, output = self._lengths(begin, place, call, draft)
            if self.max_len is not None and prompt + output > self.max_len:
                if call.turn > 1:
                    self.ended += 1
                    self._cut(begin, call.turn)
                    return
                self.clipped += 1
                output = min(output, self.max_len - 1)
                prompt = min(prompt, self.max_len - output)
            together = begin < len(self.turn) and self.turn[-1] == call.turn
            self.session.append(number)
            self.turn.append(call.turn)
            self.after.append([begin + index for index in call.after])
            self.pause.append(self.pause[-1] if together else draft.pauses[place])
            self.base.append(-1 if call.base < 0 else begin + call.base)
            self.asks.append(begin + (place if call.asks is None else call.asks))
            self.prefix.append(-1 if draft.prefix < 0 else first_prefix + draft.prefix)
            self.prefix_len.append(0 if draft.prefix < 0 else draft.prefix_len)
            self.prompt_len.append(prompt)
            self.output_len.append(output)

    def _lengths(self, begin: int, place: int, call: Call, draft: _Draft) -> tuple[int, int]:
        """Prompt and output tokens of a request before clipping."""
        if call.base < 0:
            before = draft.prefix_len if draft.prefix >= 0 else 0
        else:
            before = self.prompt_len[begin + call.base] + self.output_len[begin + call.base]
        quoted = sum(self.output_len[begin + index] for index in call.quotes)
        asked = draft.asked[place if call.asks is None else call.asks]
        return before + quoted + asked, draft.said[place]

    def _cut(self, begin: int, turn: int) -> None:
        """Remove the requests of an unfinished turn."""
        kept = begin
        while kept < len(self.turn) and self.turn[kept] < turn:
            kept += 1
        columns = (self.session, self.turn, self.after, self.pause, self.base, self.asks)
        for column in (*columns, self.prefix, self.prefix_len, self.prompt_len, self.output_len):
            del column[kept:]


STEPS = "steps_to_execution"
"""In the `extra` of a request: turns until a call of its session goes on from it."""


def sessions_of(
    programs: Sequence[Program],
    process: Arrivals,
    sessions: int | None,
    duration: float | None,
    max_len: int | None,
    seed: int,
    tell_steps: bool = False,
) -> Workload:
    """A workload of sessions that start by `process`, each of a random program; with `tell_steps`
    their requests say `STEPS`."""
    starts = _starts(process, sessions, duration, seed)
    if max_len is not None:
        require_whole("max_len", max_len, 2, LONGEST)
    shares = np.array([program.share for program in programs])
    which = pick(shares / shares.sum(), len(starts), stream(seed, "programs"))
    drafts = [
        iter(program.drafts(starts[which == number], seed))
        for number, program in enumerate(programs)
    ]
    rows = _Rows(max_len)
    counts = [0 if program.prefixes is None else program.prefixes.count for program in programs]
    firsts = list(accumulate(counts, initial=0))
    for number in which.tolist():
        rows.add(next(drafts[number]), firsts[number])
    labels = [kind.labelled(starts[which == number], seed) for number, kind in enumerate(programs)]
    clients = sorted({name for label in labels for name in label.clients})
    session = np.array(rows.session)

    def column(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Expand a column per session to one per request."""
        whole: NDArray[Any] = np.empty(len(starts), np.result_type(*values))
        for number, some in enumerate(values):
            whole[which == number] = some
        return np.asarray(whole[session])

    numbers = [np.array(list(map(clients.index, lb.clients)), np.int32)[lb.client] for lb in labels]
    lengths = (np.array(rows.prompt_len, np.int32), np.array(rows.output_len, np.int32))
    shared = (np.array(rows.prefix, np.int32), np.array(rows.prefix_len, np.int32))
    closed = process if isinstance(process, ClosedLoop) else None
    return Workload.of(
        starts[session],
        *lengths,
        priority=column([label.priority for label in labels]),
        client=column(numbers),
        clients=clients,
        deadline=column([label.deadline for label in labels]),
        prompts=GrowingPrompts(np.array(rows.base), np.array(rows.asks), *shared, *lengths),
        turns=Sessions(rows.session, rows.turn, rows.after, rows.pause),
        mode=process.mode,
        users=closed.users if closed else None,
        think_time=closed.think_time if closed else 0.0,
        extra=_next_steps(rows) if tell_steps else None,
        drawn=process.drawn or len(programs) > 1 or any(program.drawn for program in programs),
        clipped=rows.clipped,
        notices=(*notice(rows.clipped, len(session), max_len), *_ended(rows)),
    )


def _starts(process: Arrivals, sessions: int | None, duration: float | None, seed: int) -> Floats:
    if sessions is not None:
        require_whole("sessions", sessions, 1, MOST)
    elif duration is None or not isinstance(process, Timed):
        raise ConfigError("sessions: must be given, or duration where sessions have a rate")
    if duration is not None:
        require_number("duration", duration, above=0)
    rate = process.rate if isinstance(process, Timed) else 0.0

    def times(count: int) -> Floats:
        return process.times(count, stream(seed, "arrivals"))

    with np.errstate(over="ignore"):
        starts = merge([Source(times, rate)], sessions, duration).arrival
    refuse_late(f"rate={rate:g}", starts[-1])
    return starts


def _next_steps(rows: _Rows) -> list[dict[str, int]]:
    """The `extra` of each request, empty where none goes on from it."""
    said: list[dict[str, int]] = [{} for _ in rows.base]
    for row in reversed(range(len(said))):  # in the order of turns: the soonest is written last
        if (base := rows.base[row]) >= 0:
            said[base] = {STEPS: rows.turn[row] - rows.turn[base]}
    return said


def _ended(rows: _Rows) -> list[str]:
    if not rows.ended:
        return []
    why = f"their next turn would have passed max_len={rows.max_len} tokens"
    return [f"of {rows.sessions:,} sessions {rows.ended:,} ended early: {why}"]


def chat_sessions(
    *,
    sessions: int | None = None,
    duration: float | None = None,
    arrivals: str | Arrivals = "poisson",
    rate: float | None = None,
    cv: float | None = None,
    users: int | None = None,
    think_time: float | None = None,
    turns: float | Mapping[str, Any] | Draw = 1,
    think: float | Mapping[str, Any] | Draw = 0.0,
    lengths: str | Mapping[str, Any] | Lengths = "sharegpt",
    max_len: int | None = None,
    prefixes: Mapping[str, Any] | SharedPrefixes | None = None,
    priority: float | Mapping[float, float] = 0.0,
    client: str | Mapping[str, float] = "",
    deadline: float | None = None,
    seed: int = 0,
) -> Workload:
    """Multi-turn conversations; each turn is sent `think` seconds after the last answer.

    A turn's prompt is the conversation so far plus new tokens by `lengths`. Sessions start by
    `arrivals` at `rate` per second; with closed, each of `users` starts one `think_time` seconds
    after the end of its last. A session ends before the turn that would exceed `max_len`. The other
    settings are those of `synthetic`; attributes are drawn per session and shared by its requests.

    >>> fixed = {"shape": "fixed", "prompt": 10, "output": 5}
    >>> chat_sessions(sessions=2, arrivals="burst", turns=3, lengths=fixed)
    Workload(6 requests of 2 sessions at once, 25 tokens in and 5 out on average)
    """
    only = Program(
        shape=Chain(turns),
        lengths=make_lengths(lengths, max_len),
        pause=make_draw("think", think),
        prefixes=make_prefixes(prefixes),
        labels=Labels(priority, client, deadline),
    )
    process = make_arrivals(arrivals, rate=rate, cv=cv, users=users, think_time=think_time)
    return sessions_of([only], process, sessions, duration, max_len, seed)


def agents(
    *,
    programs: object,
    sessions: int | None = None,
    duration: float | None = None,
    arrivals: str | Arrivals = "poisson",
    rate: float | None = None,
    cv: float | None = None,
    users: int | None = None,
    think_time: float | None = None,
    max_len: int | None = None,
    tell_steps: bool = False,
    seed: int = 0,
) -> Workload:
    """Agent programs, each a session of sequential or parallel LLM calls with tool calls between.

    Each of the `programs` has a `share` of the sessions and a `shape`: chain (`turns`), map_reduce
    (`width`) or tree (`breadth`, `depth`, `keep`). `tool` is the time between an answer and the
    calls that depend on it; `lengths`, `prefixes`, `priority`, `client` (default: the program's
    name), `deadline` and the settings here are those of `chat_sessions`. With `tell_steps` the
    `extra` of a request says how many turns later a call goes on from it (`steps_to_execution`),
    as KVFlow's client does.
    """
    require_flag("tell_steps", tell_steps)
    if not isinstance(programs, Mapping) or not programs:
        raise ConfigError("programs: must be a mapping of names to settings, with at least one")
    classes = [_program(str(name), settings, max_len) for name, settings in programs.items()]
    weights_of("programs.share", {program.name: program.share for program in classes})
    process = make_arrivals(arrivals, rate=rate, cv=cv, users=users, think_time=think_time)
    return sessions_of(classes, process, sessions, duration, max_len, seed, tell_steps)


def _program(name: str, settings: Any, max_len: int | None) -> Program:
    with within(f"programs.{name}"):
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{settings!r}: must be a mapping of settings")
        given = {"client": name} | {str(key): value for key, value in settings.items()}
        if "shape" not in given:
            raise ConfigError("shape: must be given: chain, map_reduce or tree")
        refuse_settings("a program", given, partial(_made, name=name), hidden=("name", "max_len"))
        return _made(name=name, max_len=max_len, **given)


def _made(
    *,
    name: str,
    shape: str,
    max_len: int | None = None,
    share: float = 1.0,
    tool: float | Mapping[str, Any] | Draw = 0.0,
    lengths: str | Mapping[str, Any] | Lengths = "sharegpt",
    prefixes: Mapping[str, Any] | SharedPrefixes | None = None,
    priority: float | Mapping[float, float] = 0.0,
    client: str | Mapping[str, float] = "",
    deadline: float | None = None,
    **of_shape: Any,
) -> Program:
    return Program(
        name=name,
        shape=make("shape", str(shape), SHAPES, of_shape),
        lengths=make_lengths(lengths, max_len),
        pause=make_draw("tool", tool),
        prefixes=make_prefixes(prefixes),
        labels=Labels(priority, client, deadline),
        share=require_number("share", share, low=0),
    )
