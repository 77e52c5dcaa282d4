"""Sessions keep their prefixes in memory while their tools run."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from math import inf

from pagedsim.core import Arrived, Event, Left, Policy, Request, ServerState
from pagedsim.core.errors import require_number, require_whole
from pagedsim.core.policy import RankChanges
from pagedsim.core.request import State


class Continuum(Policy):
    """Sessions in order of their beginning, those that return in time before all others: until then
    their blocks in the prefix cache are pinned against new admissions.

    In time is within `ttl` seconds of the last answer and then, once some of its client's sessions
    have returned, within the mean gap of the last `window` returns.
    """

    paper = "Li et al., Continuum, 2025 (2511.02230)"
    needs = ("session",)
    rank_changes: RankChanges = "never"
    displacing = False

    def __init__(self, ttl: float = 2.0, window: int = 100) -> None:
        self.ttl = require_number("ttl", ttl, low=0)
        self.window = require_whole("window", window, 1)
        self._began: dict[str, float] = {}  # first arrival by session
        # When the last answer of each session ended, unless a request of it came since.
        self._answered: dict[str, float] = {}
        self._until: dict[str, float] = {}
        self._gaps: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=self.window))
        self._ranks: dict[Request, tuple[bool, float]] = {}

    def time_to_live(self, client: str) -> float:
        """Seconds for which the blocks of a client's sessions are pinned."""
        gaps = self._gaps.get(client)
        return sum(gaps) / len(gaps) if gaps else self.ttl

    def rank(self, request: Request, state: ServerState) -> tuple[bool, float]:
        if request not in self._ranks:  # it arrives
            arrival, session = request.arrival or 0.0, request.session
            late = session is None or state.now > self._until.get(session, -inf)
            began = arrival if session is None else self._began.setdefault(session, arrival)
            self._ranks[request] = (late, began)
        return self._ranks[request]

    def pin_prefix_for(self, request: Request, state: ServerState) -> float:
        if request.session is None:
            return 0.0
        seconds = self.time_to_live(request.client)
        self._until[request.session] = state.now + seconds
        return seconds

    def observe(self, event: Event) -> None:
        request, now = event
        session = request.session
        if isinstance(event, Left):
            self._ranks.pop(request, None)
        if session is None:
            return
        if isinstance(event, Left):
            if request.state is State.FINISHED:  # else it has no answer, or none yet
                self._answered[session] = now
        elif isinstance(event, Arrived) and session in self._answered:
            gap = now - self._answered.pop(session)
            if gap >= 0:  # otherwise it arrived during the answer, and waited for no tool
                self._gaps[request.client].append(gap)
