"""Replays of recorded sessions of agents: by their times, or in lanes as InferenceX's AgentX.

In a closed loop each user is a *lane*: it plays one session after another, from a queue. Calls wait
for the answers that they waited for when they were recorded, and then as long as they did then. A
lane may begin in the middle of its first session: what was last asked before that instant is asked
once more to fill the cache, in a warm-up that no metric counts, after which all lanes begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import (
    choices,
    refuse_settings,
    require_flag,
    require_number,
    require_whole,
    shown,
)
from pagedsim.core.symbolic_prompt import SymbolicPrompt
from pagedsim.workload.arrivals import Arrivals, ClosedLoop
from pagedsim.workload.draws import Labels, stream
from pagedsim.workload.limits import MOST, refuse_late
from pagedsim.workload.tokens import Prompts
from pagedsim.workload.traces.agents import MARKERS
from pagedsim.workload.traces.sessions import Call, Common, Session, Space
from pagedsim.workload.workload import Sessions, Workload

CLOCK = "clock"
DELAYS = ("answer", "think", "none", CLOCK)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How recorded sessions are played."""

    sessions: int | None = None
    """Only the first of them."""
    plays: int = 1
    """How often each is played, all of them once before any is played again."""
    delays: str | None = None
    """When a call comes: `answer`, as long after the answers that it waits for as it was recorded;
    `think`, its think time after them; `none`, at once; `clock`, at its time since the session
    began. None: clock with the trace's own arrivals, where all times were recorded, else answer."""
    max_delay: float | None = None
    """The longest such delay in seconds."""
    max_idle: float | None = None
    """Closed loop: after so many seconds without a request at the server, all that is pending
    comes sooner by the same time."""
    begin: Sequence[float] | None = None
    """Closed loop: shares of a session between which the instant is drawn at which each lane
    begins; None: at the first call, without a warm-up."""
    bust: bool = False
    """Whether each play has contents of its own behind tools and system prompt."""
    shared: bool = False
    """Whether sessions share tools of equal length, and system prompts of equal length behind
    them."""
    markers: str = "start"
    """What the time of a sub-agent's marker is in format agents: of its start or its end."""
    duration: float | None = None
    """Closed loop: seconds from the end of the warm-up after which no request is sent."""

    def __post_init__(self) -> None:
        if self.sessions is not None:
            require_whole("replay.sessions", self.sessions, 1)
        require_whole("replay.plays", self.plays, 1, MOST)
        for name, known in (("delays", DELAYS), ("markers", MARKERS)):
            if (value := getattr(self, name)) is not None and value not in known:
                raise ConfigError(f"replay.{name}={shown(value)}: {choices(str(value), known)}")
        for name in ("max_delay", "max_idle"):
            if getattr(self, name) is not None:
                require_number(f"replay.{name}", getattr(self, name), low=0)
        if self.duration is not None:
            require_number("replay.duration", self.duration, above=0)
        require_flag("replay.bust", self.bust)
        require_flag("replay.shared", self.shared)
        if self.begin is not None:
            if not isinstance(self.begin, list | tuple) or len(self.begin) != 2:
                raise ConfigError(f"replay.begin={shown(self.begin)}: must be two shares, [0, 1]")
            low = require_number("replay.begin", self.begin[0], low=0, high=1)
            require_number("replay.begin", self.begin[1], low=low, high=1)

    @classmethod
    def of(cls, settings: Any) -> Replay:
        """From settings by name; none: as recorded, once."""
        if not isinstance(settings or {}, Mapping):
            raise ConfigError(f"replay={shown(settings)}: must be a mapping of settings")
        given = {str(key): value for key, value in (settings or {}).items()}
        refuse_settings("replay", given, cls, "replay")
        return cls(**given)

    def refuse_without(self, arrivals: str) -> None:
        """Raise ConfigError for what only other arrivals have."""
        closed = arrivals == "closed"
        for name in () if closed else ("max_idle", "begin", "duration"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"replay.{name}={shown(value)}: only with arrivals=closed")
        if closed and self.delays == CLOCK:
            raise ConfigError(
                f"replay.delays={CLOCK}: must be answer, think or none with arrivals=closed, where "
                "sessions begin when others end"
            )
        if arrivals == "trace" and self.plays > 1:
            raise ConfigError(
                f"replay.plays={self.plays}: must be 1 with arrivals=trace, which has one time for "
                "each session; arrivals=closed plays them one after another"
            )


@dataclass(eq=False)
class ReplayedPrompts(Prompts):
    """Prompts of recorded calls, in runs of streams; each play may have streams of its own."""

    streams: NDArray[np.int64]  # of all runs of all calls
    ends: NDArray[np.int64]
    moves: NDArray[np.int64]  # 1 where a run's stream is of its play alone, else 0
    starts: NDArray[np.int64]  # the first run of each call, and the end
    call: NDArray[np.int64]  # of each row
    shift: NDArray[np.int64]  # of the streams of each row
    block: int | None = None

    def __getitem__(self, row: int) -> SymbolicPrompt:
        call = self.call.item(row)
        runs = slice(self.starts.item(call), self.starts.item(call + 1))
        streams = self.streams[runs]
        if shift := self.shift.item(row):
            streams = streams + shift * self.moves[runs]
        return SymbolicPrompt.up_to(streams.tolist(), self.ends[runs].tolist())


@dataclass
class _Rows:
    """Columns of the requests."""

    session: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    after: list[Sequence[int]] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    arrival: list[float] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    call: list[int] = field(default_factory=list)  # over all sessions of the trace
    play: list[int] = field(default_factory=list)

    def add(
        self, number: int, turn: int, call: int, play: int, sizes: tuple[int, int], at: float
    ) -> None:
        self.session.append(number)
        self.turn.append(turn)
        self.call.append(call)
        self.play.append(play)
        self.prompt.append(sizes[0])
        self.output.append(sizes[1])
        self.arrival.append(at)

    def waits(self, after: Sequence[int], pause: float) -> None:
        self.after.append(after)
        self.pause.append(pause)


def replayed(
    read: Sequence[Session],
    replay: Replay,
    process: Arrivals | None,
    labels: Labels,
    *,
    in_turns: bool,
    max_len: int | None,
    rate_scale: float,
    seed: int,
) -> Workload:
    """A workload of recorded sessions, which begin by `process`; None: at their own times.

    Sessions with a call of more than `max_len` tokens are left out.
    """
    fitting = [one for one in read if max_len is None or _longest(one) <= max_len]
    if not fitting:
        least = min(map(_longest, read))
        what = f"all sessions have calls of more than {max_len} tokens, of {least} at least"
        raise ConfigError(f"{what}: a longer context (server.max_model_len, max_len) would fit")
    sessions = fitting[: replay.sessions]
    closed = process if isinstance(process, ClosedLoop) else None
    clocked = process is None and all(session.clocked for session in sessions)
    delays = replay.delays or (CLOCK if clocked else "answer")
    if not in_turns and delays != CLOCK:
        raise ConfigError(f"in_turns=false: only with replay.delays={CLOCK}, not {delays}")
    queue = [(play, number) for play in range(replay.plays) for number in range(len(sessions))]
    if closed and closed.users > len(queue):
        raise ConfigError(
            f"users={closed.users}: there are only {len(queue)} sessions to play; replay.plays= "
            "plays each several times"
        )
    begins = np.array([session.begin for session in sessions]) / rate_scale
    if process is not None:
        with np.errstate(over="ignore"):
            begins = process.times(len(queue), stream(seed, "arrivals"))
        refuse_late("rate", begins[-1])
    maker = _Maker(sessions, replay, delays, in_turns, rate_scale)
    if closed and replay.begin is not None:
        maker.lanes(queue, closed.users, seed)
    for number, (play, which) in enumerate(queue):
        maker.add(number, play, which, float(begins[number]))
    rows = maker.rows
    if closed is None:
        rows = _by_arrival(rows)
    labelled = labels.draw(np.zeros(len(queue)), partial(stream, seed))
    session, arrival = np.array(rows.session), np.array(rows.arrival)
    refuse_late(f"rate_scale={rate_scale:g}", arrival[-1])

    def column(values: NDArray[Any]) -> NDArray[Any]:
        return values[session] if values.ndim else values

    turns = Sessions(
        rows.session, rows.turn, rows.after, rows.pause, warmup=len(maker.warm),
        max_idle=replay.max_idle, duration=replay.duration,
    )  # fmt: skip
    models = [{"model": call.model} for one in sessions for call in one.calls]
    extra = [MappingProxyType(model) for model in models]
    return Workload.of(
        arrival,
        rows.prompt,
        rows.output,
        priority=column(labelled.priority),
        client=column(labelled.client),
        clients=labelled.clients,
        deadline=arrival + column(labelled.deadline),
        prompts=_prompts(sessions, rows, replay),
        turns=turns,
        extra=[extra[call] for call in rows.call],
        mode="open" if process is None else process.mode,
        users=closed.users if closed else None,
        think_time=closed.think_time if closed else 0.0,
        drawn=(process is not None and process.drawn) or labels.drawn or bool(maker.instants),
        whole=True,
        notices=tuple(_notices(read, len(fitting), sessions, replay, max_len, len(maker.warm))),
    )


def _longest(session: Session) -> int:
    return max(call.prompt + call.output for call in session.calls)


@dataclass
class _Maker:
    """Makes the rows of sessions as they are played."""

    sessions: Sequence[Session]
    replay: Replay
    delays: str
    in_turns: bool
    rate_scale: float
    rows: _Rows = field(default_factory=_Rows)
    instants: dict[int, float] = field(default_factory=dict)
    """When each lane begins, in its first session."""
    warm: Sequence[int] = ()
    """Rows of the warm-up."""

    def __post_init__(self) -> None:
        counts = [len(session.calls) for session in self.sessions]
        self._first = np.concatenate([[0], np.cumsum(counts)]).tolist()

    def lanes(self, queue: Sequence[tuple[int, int]], users: int, seed: int) -> None:
        """Draw the instants at which lanes begin, and add the warm-up: each agent that is at work
        then asks again what it asked last, for one token."""
        low, high = self.replay.begin or (0.0, 0.0)
        shares = stream(seed, "lanes").uniform(low, high, users).tolist()
        for number, (share, (play, which)) in enumerate(zip(shares, queue, strict=False)):
            calls = self.sessions[which].calls
            self.instants[number] = instant = share * calls[-1].at
            last = {call.agent: place for place, call in enumerate(calls) if call.at < instant}
            active = {call.agent for call in calls if call.at >= instant}
            for place in sorted(place for agent, place in last.items() if agent in active):
                sizes = (calls[place].prompt, 1)
                self.rows.add(number, place + 1, self._first[which] + place, play, sizes, 0.0)
                self.rows.waits([], 0.0)
        self.warm = range(len(self.rows.turn))

    def add(self, number: int, play: int, which: int, begin: float) -> None:
        """Add the calls of a session; of a lane's first one those since the lane's instant."""
        calls, rows = self.sessions[which].calls, self.rows
        instant = self.instants.get(number)
        row_of: dict[int, int] = {}
        for place, call in enumerate(calls):
            if instant is not None and call.at < instant:
                continue
            at = begin + call.at / self.rate_scale if self.delays == CLOCK else begin
            sizes = (call.prompt, call.output)
            waited = [other for other in call.after if other in row_of]
            waits = self._waits(call, calls, waited, row_of, instant)
            row_of[place] = len(rows.turn)
            rows.add(number, place + 1, self._first[which] + place, play, sizes, at)
            rows.waits(*waits)

    def _waits(
        self,
        call: Call,
        calls: Sequence[Call],
        waited: Sequence[int],
        row_of: Mapping[int, int],
        instant: float | None,
    ) -> tuple[Sequence[int], float]:
        """The rows that a call waits for, and how long it comes after them."""
        if self.delays == CLOCK:
            return [row_of[other] for other in waited] if self.in_turns else [], 0.0
        if not waited and instant is not None:
            return self.warm, self._delay(call.at - instant)
        if not waited and row_of:  # another that begins alone: counted from the session's first
            waited = [next(iter(row_of))]
        if not waited:
            return [], 0.0
        delay = call.at - max(calls[other].end for other in waited)
        if self.delays == "think" and call.think is not None and len(call.after) == 1:
            delay = call.think
        return [row_of[other] for other in waited], self._delay(delay)

    def _delay(self, seconds: float) -> float:
        most = self.replay.max_delay
        seconds = 0.0 if self.delays == "none" else max(seconds, 0.0)
        return seconds if most is None else min(seconds, most)


def _by_arrival(rows: _Rows) -> _Rows:
    """The rows in order of arrival; those that arrive at once stay as they are."""
    order = np.argsort(rows.arrival, kind="stable").tolist()
    row_of = {old: new for new, old in enumerate(order)}
    columns = {name: [column[old] for old in order] for name, column in vars(rows).items()} | {
        "after": [[row_of[other] for other in rows.after[old]] for old in order]
    }
    return _Rows(**columns)


def _prompts(sessions: Sequence[Session], rows: _Rows, replay: Replay) -> ReplayedPrompts:
    streams, ends, moves, counts = list[int](), list[int](), list[int](), list[int]()
    shared: dict[Common, int] = {}
    if replay.shared:
        keys = (key for session in sessions for key in session.common.values())
        shared = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    bases, total = dict[Space, int](), len(shared)
    for session in sessions:
        if session.space not in bases:
            bases[session.space] = total
            total += session.space.streams
        base, common = bases[session.space], session.common
        for call in session.calls:
            for run in call.streams:
                key = common.get(run)
                streams.append(shared.get(key, base + run) if key else base + run)
                moves.append(key is None)
            ends += call.ends
            counts.append(len(call.streams))
    blocks = {session.block for session in sessions}
    plays = np.array(rows.play, np.int64)
    return ReplayedPrompts(
        np.array(streams, np.int64),
        np.array(ends, np.int64),
        np.array(moves, np.int64),
        np.concatenate([[0], np.cumsum(counts)]),
        np.array(rows.call, np.int64),
        plays * total if replay.bust else np.zeros_like(plays),
        blocks.pop() if len(blocks) == 1 else None,
    )


def _notices(
    read: Sequence[Session],
    fitting: int,
    sessions: Sequence[Session],
    replay: Replay,
    max_len: int | None,
    warm: int,
) -> Iterator[str]:
    """What a reader must know of the sessions: what is left out, and what was not recorded."""
    if fitting < len(read):
        out = f"{len(read) - fitting} of {len(read)} sessions"
        yield f"left out, since they have calls of more than {max_len:,} tokens: {out}"
    if len(sessions) < fitting:
        yield f"only the first {len(sessions)} of {fitting} sessions are played"

    def total(name: str) -> int:
        return sum(getattr(session, name) for session in sessions)

    if count := total("orphans"):
        yield f"{count:,} sub-agents were left out, since no call of their parent precedes them"
    if count := total("undated"):
        yield f"{count:,} calls were left out, since nothing says when they were"
    if count := total("unknown"):
        yield f"{count:,} calls have no hash_ids: their prompts are unlike all others"
    if (count := total("late")) and replay.markers == "start":
        yield (
            f"{count:,} calls were made before the sub-agents that they wait for had returned, if "
            "these began at their markers; replay.markers=end takes markers for returns"
        )
    models = {call.model for session in sessions for call in session.calls if call.model}
    if len(models) > 1:
        yield f"calls of {len(models)} models are all served by the one that is simulated"
    if warm:
        yield f"{warm:,} calls of the warm-up are served first, and are in no metric"
