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
from math import inf
from typing import Any, NamedTuple

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
    """How recorded sessions are played; `conf/workload/trace.yaml` explains each setting."""

    sessions: int | None = None
    plays: int = 1
    delays: str | None = None
    max_delay: float | None = None
    max_idle: float | None = None
    begin: Sequence[float] | None = None
    bust: bool = False
    shared: bool = False
    markers: str = "start"
    duration: float | None = None

    def __post_init__(self) -> None:
        for name in ("sessions", "plays"):
            if (value := getattr(self, name)) is not None or name == "plays":
                require_whole(f"replay.{name}", value, 1, MOST)
        for name, known in (("delays", DELAYS), ("markers", MARKERS)):
            if (value := getattr(self, name)) is not None and value not in known:
                raise ConfigError(f"replay.{name}={shown(value)}: {choices(str(value), known)}")
        for name in ("max_delay", "max_idle", "duration"):
            if (value := getattr(self, name)) is not None:
                require_number(f"replay.{name}", value, low=0)
        for name in ("bust", "shared"):
            require_flag(f"replay.{name}", getattr(self, name))
        if self.begin is not None:
            if not isinstance(self.begin, list | tuple) or len(self.begin) != 2:
                raise ConfigError(f"replay.begin={shown(self.begin)}: must be two shares, [0, 1]")
            low, high = (
                require_number("replay.begin", share, low=0, high=1) for share in self.begin
            )
            if low > high:
                what = "must have the lower share first"
                raise ConfigError(f"replay.begin={shown(list(self.begin))}: {what}")

    @classmethod
    def of(cls, settings: Any, arrivals: str) -> Replay:
        """From settings by name; ConfigError for those that only other arrivals have."""
        if not isinstance(settings or {}, Mapping):
            raise ConfigError(f"replay={shown(settings)}: must be a mapping of settings")
        given = {str(key): value for key, value in (settings or {}).items()}
        refuse_settings("replay", given, cls, "replay")
        made = cls(**given)
        for name in ("max_idle", "begin", "duration") if arrivals != "closed" else ():
            if (value := getattr(made, name)) is not None:
                raise ConfigError(f"replay.{name}={shown(value)}: only with arrivals=closed")
        if arrivals == "closed" and made.delays == CLOCK:
            what = "arrivals=closed has no times: must be answer, think or none"
            raise ConfigError(f"replay.delays={CLOCK}: {what}")
        if arrivals == "trace" and made.plays > 1:
            what = "must be 1 with arrivals=trace, which has one time for each session"
            raise ConfigError(f"replay.plays={made.plays}: {what}; arrivals=closed has none")
        return made


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
        streams = self.streams[runs] + self.shift.item(row) * self.moves[runs]
        return SymbolicPrompt.up_to(streams.tolist(), self.ends[runs].tolist())


class _Row(NamedTuple):
    arrival: float
    session: int  # in the queue
    turn: int
    call: int  # over all sessions of the trace
    play: int
    prompt: int
    output: int
    after: Sequence[int]
    pause: float


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
    sessions, notes = _chosen(read, replay, max_len)
    closed = process if isinstance(process, ClosedLoop) else None
    clocked = process is None and all(session.clocked for session in sessions)
    delays = replay.delays or (CLOCK if clocked else "answer")
    if not in_turns and delays != CLOCK:
        raise ConfigError(f"in_turns=false: only with replay.delays={CLOCK}, not {delays}")
    if process is None and len(sessions) > 1 and not any(session.begin for session in sessions):
        notes.append(
            f"all {len(sessions)} sessions begin at once, since each has times of its own: "
            "workload.arrivals=poisson workload.rate= spreads them, and workload.arrivals=closed "
            "workload.users= plays them in lanes, as workload=agentx does"
        )
    maker = _Maker(sessions, replay, delays, in_turns, rate_scale, seed)
    queued = maker.play(process)
    if warm := len(maker.warm):
        notes.append(f"{warm:,} calls of the warm-up are served first, and are in no metric")
    rows = list(_by_arrival(maker.rows))
    arrival = np.array([row.arrival for row in rows])
    session = np.array([row.session for row in rows])
    refuse_late(f"rate_scale={rate_scale:g}", arrival[-1])
    labelled = labels.draw(np.zeros(queued), partial(stream, seed))
    priority, client, deadline = (
        column[session] if column.ndim else column
        for column in (labelled.priority, labelled.client, labelled.deadline)
    )
    models = (call.model for one in sessions for call in one.calls)
    extra = [{"model": model} if model else {} for model in models]
    return Workload.of(
        arrival,
        [row.prompt for row in rows],
        [row.output for row in rows],
        priority=priority,
        client=client,
        clients=labelled.clients,
        deadline=arrival + deadline,
        prompts=_prompts(sessions, rows, replay),
        turns=Sessions(
            session,
            [row.turn for row in rows],
            [row.after for row in rows],
            [row.pause for row in rows],
            warmup=warm,
            max_idle=replay.max_idle,
            duration=replay.duration,
        ),
        extra=[extra[row.call] for row in rows],
        mode="open" if process is None else process.mode,
        users=closed.users if closed else None,
        think_time=closed.think_time if closed else 0.0,
        drawn=(process is not None and process.drawn) or labels.drawn or bool(maker.instants),
        whole=True,
        notices=notes,
    )


def _chosen(
    read: Sequence[Session], replay: Replay, max_len: int | None
) -> tuple[Sequence[Session], list[str]]:
    """The sessions that are played, and what a reader must know of them."""
    longest = [max(call.prompt + call.output for call in session.calls) for session in read]
    fitting = [
        one for one, tokens in zip(read, longest, strict=True) if not max_len or tokens <= max_len
    ]
    if not fitting:
        what = f"all sessions have calls of more than {max_len} tokens, of {min(longest)} at least"
        raise ConfigError(
            f"{what}: take a model= with a longer context, no lower server.max_model_len= or "
            "workload.max_len=, and memory.blocks= that hold them"
        )
    sessions, notes = fitting[: replay.sessions], list[str]()
    if len(fitting) < len(read):
        out = f"{len(read) - len(fitting)} of {len(read)} sessions"
        notes.append(f"left out, since they have calls of more than {max_len:,} tokens: {out}")
    if len(sessions) < len(fitting):
        notes.append(f"sessions that are played: the first {len(sessions)} of {len(fitting)}")
    counted = {
        "orphans": "sub-agents were left out, since no call of their parent precedes them",
        "undated": "calls were left out, since nothing says when they were",
        "unknown": "calls have no hash_ids: their prompts are unlike all others",
        "late": "calls were made before the sub-agents that they wait for had returned, if these "
        "began at their markers; replay.markers=end takes markers for returns",
    }
    for name, what in counted.items():
        if count := sum(getattr(session, name) for session in sessions):
            notes.append(f"{count:,} {what}")
    models = {call.model for session in sessions for call in session.calls if call.model}
    if len(models) > 1:
        notes.append(f"calls of {len(models)} models are all served by the one that is simulated")
    return sessions, notes


@dataclass
class _Maker:
    """Makes the rows of sessions as they are played."""

    sessions: Sequence[Session]
    replay: Replay
    delays: str
    in_turns: bool
    rate_scale: float
    seed: int
    rows: list[_Row] = field(default_factory=list)
    instants: dict[int, float] = field(default_factory=dict)
    """When each lane begins, in its first session."""
    warm: Sequence[int] = ()
    """Rows of the warm-up."""

    def __post_init__(self) -> None:
        counts = [len(session.calls) for session in self.sessions]
        self._first = np.concatenate([[0], np.cumsum(counts)]).tolist()

    def play(self, process: Arrivals | None) -> int:
        """Add all sessions, as often as they are played; returns how many that is."""
        every, plays = range(len(self.sessions)), range(self.replay.plays)
        queue = [(play, which) for play in plays for which in every]
        begins = [session.begin / self.rate_scale for session in self.sessions]
        if process is not None:
            with np.errstate(over="ignore"):
                begins = process.times(len(queue), stream(self.seed, "arrivals")).tolist()
            refuse_late("rate", begins[-1])
        if isinstance(process, ClosedLoop):
            if process.users > len(queue):
                what = f"must be at most the number of sessions to play, {len(queue)}"
                raise ConfigError(f"users={process.users}: {what}; replay.plays= plays them again")
            if self.replay.begin is not None:
                self._lanes(queue, process.users)
        for number, ((play, which), begin) in enumerate(zip(queue, begins, strict=True)):
            self._add(number, play, which, begin)
        return len(queue)

    def _lanes(self, queue: Sequence[tuple[int, int]], users: int) -> None:
        """Draw the instants at which lanes begin, and add the warm-up: each agent that is at work
        then asks again what it asked last, for one token, so that all lanes reach their instants
        together; `max_idle` bounds how long before."""
        low, high = self.replay.begin or (0.0, 0.0)
        most = inf if self.replay.max_idle is None else self.replay.max_idle
        shares = stream(self.seed, "lanes").uniform(low, high, users).tolist()
        for number, (share, (play, which)) in enumerate(zip(shares, queue, strict=False)):
            calls, first = self.sessions[which].calls, self._first[which]
            self.instants[number] = instant = share * calls[-1].at
            last = {call.agent: place for place, call in enumerate(calls) if call.at < instant}
            active = {call.agent for call in calls if call.at >= instant}
            for place in sorted(place for agent, place in last.items() if agent in active):
                of = (number, place + 1, first + place, play, calls[place].prompt, 1)
                lead = min(self._delay(instant - calls[place].at), most)
                self.rows.append(_Row(0.0, *of, (), lead))
        longest = max((row.pause for row in self.rows), default=0.0)
        self.rows = [row._replace(pause=longest - row.pause) for row in self.rows]
        self.warm = range(len(self.rows))

    def _add(self, number: int, play: int, which: int, begin: float) -> None:
        """Add the calls of a session; of a lane's first one those since the lane's instant."""
        calls, row_of = self.sessions[which].calls, dict[int, int]()
        for place, call in enumerate(calls):
            if call.at < self.instants.get(number, 0.0):
                continue
            at = begin + call.at / self.rate_scale if self.delays == CLOCK else begin
            waits = self._waits(call, calls, row_of, self.instants.get(number))
            row_of[place] = len(self.rows)
            of = (number, place + 1, self._first[which] + place, play, call.prompt, call.output)
            self.rows.append(_Row(at, *of, *waits))

    def _waits(
        self, call: Call, calls: Sequence[Call], row_of: Mapping[int, int], instant: float | None
    ) -> tuple[Sequence[int], float]:
        """The rows that a call waits for, and how long it comes after them."""
        waited = [other for other in call.after if other in row_of]
        if self.delays == CLOCK:
            return [row_of[other] for other in waited] if self.in_turns else [], 0.0
        if not waited and instant is not None:
            return self.warm, self._delay(call.at - instant)
        if not waited:  # another that begins alone: counted from the session's first
            waited = list(row_of)[:1]
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


def _by_arrival(rows: Sequence[_Row]) -> Iterator[_Row]:
    """The rows in order of arrival; those that arrive at once stay as they are."""
    order = sorted(range(len(rows)), key=lambda row: rows[row].arrival)
    row_of = {old: new for new, old in enumerate(order)}
    for old in order:
        yield rows[old]._replace(after=[row_of[other] for other in rows[old].after])


def _prompts(sessions: Sequence[Session], rows: Sequence[_Row], replay: Replay) -> ReplayedPrompts:
    """The prompts of all rows."""
    shared: dict[Common, int] = {}
    if replay.shared:
        keys = (key for session in sessions for key in session.common.values())
        shared = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    bases, total = dict[Space, int](), len(shared)
    runs, counts = list[tuple[int, int, bool]](), [0]
    for session in sessions:
        if session.space not in bases:
            bases[session.space] = total
            total += session.space.streams
        base, common = bases[session.space], session.common
        for call in session.calls:
            counts.append(len(call.streams))
            for run, end in zip(call.streams, call.ends, strict=True):
                key = common.get(run)
                number = base + run if key is None else shared.get(key, base + run)
                runs.append((number, end, key is None))
    blocks = {session.block for session in sessions}
    streams, ends, moves = np.array(runs, np.int64).T.copy()
    return ReplayedPrompts(
        streams,
        ends,
        moves,
        starts=np.cumsum(counts),
        call=np.array([row.call for row in rows]),
        shift=np.array([row.play for row in rows], np.int64) * (total if replay.bust else 0),
        block=blocks.pop() if len(blocks) == 1 else None,
    )
