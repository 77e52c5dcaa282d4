"""Multi-level feedback queues, and those that a request joins further down."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from pagedsim.core import Admitted, Arrived, Event, Left, Policy, Preempted, Request, ServerState
from pagedsim.core.errors import require_flag, require_number, require_whole
from pagedsim.core.policy import RankChanges
from policies.due import Due


@dataclass(slots=True)
class Place:
    """Where a request stands."""

    level: int
    since: float  # when it joined the batch, or began to wait
    generated: int = -1  # tokens when it joined the batch; -1: it waits
    served: float = 0.0  # seconds in the batch before, at this level
    due: float = inf  # when its level changes next, if nothing happens to it


class MLFQ(Policy):
    """Who was served least goes first: it falls a level when it had that level's quantum.

    The quantum of level k is `quantum` × 2^k seconds, and the last of `levels` has no end. Who
    waited `starve` seconds goes back to the first level.
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
            place.due = now  # nobody falls before it has gained a token, or some would not get on
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
