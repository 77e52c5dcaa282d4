"""References of the policies that rank requests by what each, or its session, was given."""

from __future__ import annotations

from math import inf

from pagedsim.core import Admitted, Arrived, Left, Preempted, Request, ServerState
from pagedsim.core.policy import RankChanges
from pagedsim.core.request import State
from tests.policies.reference.log import Entry, Logged


class MLFQ(Logged):
    """Levels with quanta of 1, 2, 4 … times `quantum`, and back to the first after `starve`.

    Here, other than in vllm-ltr, a request falls as soon as it had its quantum, if it has gained a
    token since it joined the batch.
    """

    def __init__(
        self, quantum: float = 0.01, levels: int = 16, starve: float = 3.0, displace: bool = True
    ) -> None:
        super().__init__()
        self.quantum, self.levels, self.starve = quantum, levels, starve
        self.displacing = displace

    def length(self, level: int) -> float:
        """The quantum of a level, in seconds."""
        return inf if level == self.levels - 1 else self.quantum * 2**level

    def rank(self, request: Request, state: ServerState) -> float:
        self.state = state
        first = next((e for e in self.log if e.request is request), None)
        if first is None:
            return self.entry(request, self.log)
        level = self.entry(request, self.log[: self.log.index(first)])
        served = 0.0
        for stay in self.stays(request, state.now):
            if stay.runs:
                served += stay.seconds
                while stay.gained and served >= self.length(level):
                    served -= self.length(level)
                    level += 1
            elif level and stay.seconds >= self.starve:
                level, served = 0, 0.0
        return level

    def entry(self, request: Request, log: list[Entry]) -> int:
        """The level of a request that arrives after `log`."""
        return 0


class SkipJoin(MLFQ):
    """FastServe: the first level whose quantum covers the prefill."""

    def __init__(self, *args: float, prefill_rate: float = 10_000.0, **settings: float) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self.prefill_rate = prefill_rate

    def entry(self, request: Request, log: list[Entry]) -> int:
        level = 0
        while self.length(level) < request.prompt_len / self.prefill_rate:
            level += 1
        return level


class PLAS(MLFQ):
    """Autellix: the level that a request with the service of the whole session would be on."""

    def __init__(self, *args: float, critical_path: bool = False, **settings: float) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self.critical_path = critical_path

    def entry(self, request: Request, log: list[Entry]) -> int:
        service = 0.0 if request.session is None else self.service(request.session, log)
        level = 0
        while service >= self.length(level):
            service -= self.length(level)
            level += 1
        return level

    def service(self, session: str, log: list[Entry]) -> float:
        """Seconds that the finished requests of a session had, or the longest chain of them."""
        total, longest, began = 0.0, 0.0, {}
        for entry in log:
            if entry.request.session == session:
                if isinstance(entry.event, Arrived):
                    began[entry.request] = longest
                elif isinstance(entry.event, Left):
                    had = self.seconds(entry.request)
                    total += had
                    longest = max(longest, began[entry.request] + had)
        return longest if self.critical_path else total

    def seconds(self, request: Request) -> float:
        """Seconds that a request that left was in the batch."""
        return sum(stay.seconds for stay in self.stays(request, inf) if stay.runs)


class LTR(Logged):
    """Lowest predicted rank first, and before all a request that was idle for `starve` steps.

    Here, other than in vllm-ltr, the period of urgency is counted in tokens of the request.
    """

    def __init__(self, starve: int = 256, period: int = 32, displace: bool = True) -> None:
        super().__init__()
        self.starve, self.period, self.displacing = starve, period, displace

    def rank(self, request: Request, state: ServerState) -> tuple[float, float]:
        self.state = state
        until = 0  # tokens up to which it is urgent
        for stay in self.stays(request, state.now):
            idle = not stay.runs and stay.step - stay.began.step >= self.starve
            if idle and until <= stay.generated:
                until = stay.generated + self.period
        guess = request.predicted_len
        return (-1 if until > request.generated else 0, inf if guess is None else guess)


class Continuum(Logged):
    """Sessions by age; before all others those that return within the time to live."""

    def __init__(self, ttl: float = 2.0, window: int = 100) -> None:
        super().__init__()
        self.ttl, self.window = ttl, window

    def rank(self, request: Request, state: ServerState) -> tuple[bool, float]:
        self.state = state
        known = [entry for entry in self.log if entry.request is request]
        came = known[0].now if known else state.now
        session = request.session
        if session is None:
            return (True, came)
        others = [entry.request for entry in self.log if entry.request.session == session]
        began = min([one.arrival or 0.0 for one in others], default=came)
        return (came > self.kept(session, came), min(began, request.arrival or 0.0))

    def kept(self, session: str, came: float) -> float:
        """Until when the memory of a session was kept, as known at the time `came`."""
        until = -inf
        for place, entry in enumerate(self.log):
            if answers(entry) and entry.now <= came and entry.request.session == session:
                until = entry.now + self.time_to_live(entry.request.client, self.log[:place])
        return until

    def pin_prefix_for(self, request: Request, state: ServerState) -> float:
        return 0.0 if request.session is None else self.time_to_live(request.client, self.log)

    def time_to_live(self, client: str, log: list[Entry]) -> float:
        """The mean of the last gaps between an answer and the session's next request."""
        gaps, ended = [], dict[str, float]()
        for entry in log:
            session = entry.request.session
            if session is None:
                continue
            if answers(entry):
                ended[session] = entry.now
            elif isinstance(entry.event, Arrived) and session in ended:
                gap = entry.now - ended.pop(session)
                if gap >= 0 and entry.request.client == client:
                    gaps.append(gap)
        gaps = gaps[-self.window :]
        return sum(gaps) / len(gaps) if gaps else self.ttl


def answers(entry: Entry) -> bool:
    """Whether a request leaves with an answer, neither rejected nor aborted nor for elsewhere."""
    return isinstance(entry.event, Left) and entry.state is State.FINISHED


class SessionAffinity(Logged):
    """vLLM's proposal: of the queue's beginning, a call whose session ran lately goes first.

    Ranks are those at the beginning of a step. Here, other than there, a session that runs counts
    as the last that ran, and one that does not by when it left the batch.
    """

    rank_changes: RankChanges = "when stale"

    def __init__(
        self, window: int = 32, min_blocks: int = 1, max_wait: float = 0.5, ttl: float = 60.0
    ) -> None:
        super().__init__()
        self.window, self.min_blocks, self.max_wait, self.ttl = window, min_blocks, max_wait, ttl
        self.promoted: Request | None = None

    def stale(self, state: ServerState) -> bool:
        self.state = state
        if state.sequences < state.max_seqs:
            self.promoted = self.chosen(state)
        return True

    def rank(self, request: Request, state: ServerState) -> int:
        if request.preemptions:
            return -1
        return 0 if request is self.promoted else 1

    def chosen(self, state: ServerState) -> Request | None:
        queue = waiting(self.log)[: self.window]
        if any(one.preemptions for one in waiting(self.log)):
            return None
        if not queue or state.now - (queue[0].arrival or 0.0) >= self.max_wait:
            return None
        keys = []
        for place, one in enumerate(queue):
            blocks, ran = state.cached_tokens(one) // state.block_size, self.ran(one.session)
            if place and ran >= state.now - self.ttl and blocks >= self.min_blocks:
                keys.append((blocks, ran, -place))
        return queue[-max(keys)[2]] if keys else None

    def ran(self, session: str | None) -> float:
        """When a session was in the batch; infinite if it is."""
        last, times = dict[Request, Entry](), [-inf]
        for entry in self.log:
            if entry.request.session == session is not None:
                before = last.get(entry.request)
                if before is not None and isinstance(before.event, Admitted):
                    times.append(entry.now)
                last[entry.request] = entry
        return inf if any(isinstance(e.event, Admitted) for e in last.values()) else times[-1]


class ProgramAware(Logged):
    """llm-d: the score of each program that waits, from all that its requests had."""

    rank_changes: RankChanges = "when stale"

    def __init__(self, service: float = 0.8, wait: float = 0.2, half_life: float = 60.0) -> None:
        super().__init__()
        self.weights, self.half_life = (service, wait), half_life
        self.seen: list[Entry] = []  # at the beginning of the step
        self.now = 0.0

    def stale(self, state: ServerState) -> bool:
        self.state, self.seen, self.now = state, list(self.log), state.now
        return True

    def rank(self, request: Request, state: ServerState) -> float:
        heads = dict[str | None, Request]()
        for one in sorted(waiting(self.seen), key=self.waited, reverse=True):
            heads.setdefault(one.session, one)
        served = scaled(self.had(request.session), list(map(self.had, heads)))
        waits = scaled(self.waited(request), list(map(self.waited, heads.values())))
        service, wait = self.weights
        return -(service * (1 - served) + wait * waits)

    def waited(self, request: Request) -> float:
        return self.now - (request.arrival or 0.0)

    def had(self, program: str | None) -> float:
        """Tokens of a program's finished requests, each as old as its end."""
        total = 0.0
        for entry in self.seen:
            if answers(entry) and entry.request.session == program:
                age = (self.now - entry.now) / self.half_life if self.half_life else 0.0
                total += (entry.request.prompt_len + 2 * entry.request.generated) / 2**age
        return total


def scaled(value: float, among: list[float]) -> float:
    """A value on the scale of the least of some, 0, to the most of them, 1."""
    if not among or min(among) == max(among):
        return 0.5
    return (value - min(among)) / (max(among) - min(among))


def waiting(log: list[Entry]) -> list[Request]:
    """The requests whose last event brought them into the queue, in order of arrival."""
    last = {entry.request: entry.event for entry in log}
    return [one for one, event in last.items() if isinstance(event, (Arrived, Preempted))]
