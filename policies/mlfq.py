"""Multi-level feedback queues, by the service of a request or of its session."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from pagedsim.core import Admitted, Arrived, Event, Left, Policy, Preempted, Request, ServerState
from pagedsim.core.errors import require_flag, require_number, require_whole
from pagedsim.core.policy import RankChanges


class Due:
    """Requests whose ranks change at known times, so that no other is ranked again."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._noted = 0  # so that requests need not be compared

    def note(self, request: Request, when: float) -> None:
        """Note that a rank changes then; earlier notes stay."""
        if when < inf:
            heappush(self._heap, (when, self._noted, request))
            self._noted += 1

    def take(self, now: float) -> list[tuple[float, Request]]:
        """Remove and return all that are due by now with their times, the soonest first."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            when, _, request = heappop(self._heap)
            taken.append((when, request))
        return taken


@dataclass(slots=True)
class Place:
    """Where a request stands."""

    level: int
    since: float  # when it joined the batch, or began to wait
    generated: int = -1  # tokens when it joined the batch; -1: it waits
    served: float = 0.0  # seconds in the batch before, at this level
    due: float = inf  # when its level changes next, if nothing happens to it


class MLFQ(Policy):
    """The least served request goes first: it falls a level after that level's quantum.

    The quantum of level k is `quantum` × 2^k seconds; the last of `levels` has none. A request
    that waited `starve` seconds returns to the first level.
    """

    paper = "Corbató et al., 1962; with the rules of vllm-ltr (2408.15792)"
    rank_changes: RankChanges = "when stale"

    def __init__(
        self, quantum: float = 0.01, levels: int = 16, starve: float = 3.0, displace: bool = True
    ) -> None:
        self.quantum = require_number("quantum", quantum, above=0)
        self.levels = require_whole("levels", levels, 1, 64)
        self.starve = require_number("starve", starve, above=0)
        self.displacing = require_flag("displace", displace)
        # The quantum of each level, in seconds.
        self.quanta = [*(self.quantum * 2**level for level in range(self.levels - 1)), inf]
        self._places: dict[Request, Place] = {}
        self._due = Due()

    def entry(self, request: Request) -> int:
        """The level that a request joins."""
        return 0

    def rank(self, request: Request, state: ServerState) -> float:
        place = self._places.get(request)
        return self.entry(request) if place is None else place.level  # without a place, it arrives

    def _settle(self, request: Request, place: Place, now: float) -> None:
        """Bring a place up to date."""
        if place.generated < 0:
            if place.level and now >= place.since + self.starve:
                place.level, place.served = 0, 0.0
            place.due = place.since + self.starve if place.level else inf
        elif request.generated == place.generated:
            place.due = now  # no request falls before it gains a token, or some might starve
        else:
            while now >= (end := place.since + self.quanta[place.level] - place.served):
                place.level, place.served, place.since = place.level + 1, 0.0, end
            place.due = end

    def stale(self, state: ServerState) -> Collection[Request]:
        moved = []
        for when, request in self._due.take(state.now):
            place = self._places.get(request)
            if place is not None and place.due == when:  # or something has happened since
                level = place.level
                self._settle(request, place, state.now)
                self._due.note(request, place.due)
                if place.level != level:
                    moved.append(request)
        return moved

    def observe(self, event: Event) -> None:
        (request, now), admitted = event, isinstance(event, Admitted)
        if isinstance(event, Left):
            del self._places[request]
            return
        if isinstance(event, Arrived):
            self._places[request] = Place(self.entry(request), now)
        place = self._places[request]
        self._settle(request, place, now)
        if isinstance(event, Preempted):
            place.served += now - place.since
        place.generated, place.since = request.generated if admitted else -1, now
        self._settle(request, place, now)
        self._due.note(request, place.due)


class SkipJoin(MLFQ):
    """As `mlfq`, but a request joins the first level whose quantum holds its whole prefill.

    `prefill_rate` is the speed of a prefill in tokens/s, by which its time is known beforehand.
    """

    paper = "Wu et al., Fast Distributed Inference Serving, 2023 (2305.05920)"

    def __init__(
        self,
        quantum: float = 0.01,
        levels: int = 16,
        starve: float = 3.0,
        displace: bool = True,
        prefill_rate: float = 10_000.0,
    ) -> None:
        super().__init__(quantum, levels, starve, displace)
        self.prefill_rate = require_number("prefill_rate", prefill_rate, above=0)

    def entry(self, request: Request) -> int:
        seconds = request.prompt_len / self.prefill_rate
        return next(level for level, quantum in enumerate(self.quanta) if seconds <= quantum)


class PLAS(MLFQ):
    """As `mlfq`, but a request joins the level of what its session was served before.

    That is the time that its finished requests spent in the batch, all together, or with
    `critical_path` of the longest chain of them, since those that go in parallel take as long as
    one (ATLAS). A level is joined once the quanta of those before it are used up.
    """

    paper = "Luo et al., Autellix, 2025 (2502.13965): PLAS; with critical_path, ATLAS"
    needs = ("session",)

    def __init__(
        self,
        quantum: float = 0.01,
        levels: int = 16,
        starve: float = 3.0,
        displace: bool = True,
        critical_path: bool = False,
    ) -> None:
        super().__init__(quantum, levels, starve, displace)
        self.critical_path = require_flag("critical_path", critical_path)
        self._service: defaultdict[str | None, float] = defaultdict(float)
        self._began: dict[Request, float] = {}  # service of its session at its arrival
        self._since: dict[Request, float] = {}  # when those in the batch joined it
        self._had: defaultdict[Request, float] = defaultdict(float)  # seconds in the batch before
        self._raised: list[Request] = []  # arrivals whose session may have been served since `add`

    def entry(self, request: Request) -> int:
        left = self._service[request.session]
        for level, quantum in enumerate(self.quanta):
            if left < quantum:
                return level
            left -= quantum
        return self.levels - 1

    def stale(self, state: ServerState) -> Collection[Request]:
        raised, self._raised = self._raised, []
        return [*raised, *super().stale(state)]

    def observe(self, event: Event) -> None:
        request, now = event
        if isinstance(event, Arrived):
            self._began[request] = self._service[request.session]
        elif isinstance(event, Admitted):
            self._since[request] = now
        elif request in self._since:
            self._had[request] += now - self._since.pop(request)
        if isinstance(event, Left):
            self._end(request)
        super().observe(event)
        if isinstance(event, Arrived) and self._places[request].level:
            self._raised.append(request)

    def _end(self, request: Request) -> None:
        """Its session has had what it got."""
        began, had = self._began.pop(request), self._had.pop(request, 0.0)
        if request.session is None:
            return
        so_far = self._service[request.session]
        longest = max(so_far, began + had)
        self._service[request.session] = longest if self.critical_path else so_far + had
