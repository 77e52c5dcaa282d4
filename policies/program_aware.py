"""Least attained service by program, blended with the time waited."""

from __future__ import annotations

from math import inf

from pagedsim.core import Admitted, Arrived, Event, Left, Policy, Preempted, Request, ServerState
from pagedsim.core.errors import require_number
from pagedsim.core.policy import RankChanges
from pagedsim.core.request import State

OUTPUT = 2
"""What a generated token counts, in tokens of a prompt."""


class ProgramAware(Policy):
    """The programs that were served least go first, blended with how long they wait.

    The score of a program is `service` × (1 − its attained service) + `wait` × the time that its
    first request has waited; the highest goes first. Both are scaled to 0 to 1 over the programs
    that wait, and are 0.5 for all where they are equal. Attained service is the tokens of prompts,
    cached ones too, and twice the generated tokens of finished requests; it is added when a
    request ends, and halves in `half_life` seconds (0: never).

    Our reading: a program is a session, and requests without one are a program together. Scores
    are those at the beginning of a step, in which a program's later requests have scores by their
    own waits.
    """

    paper = "rules of llm-d-router's program-aware-fairness, strategy las (ebab687)"
    needs = ("session",)
    rank_changes: RankChanges = "when stale"
    displacing = False

    def __init__(self, service: float = 0.8, wait: float = 0.2, half_life: float = 60.0) -> None:
        self.service = require_number("service", service, low=0)
        self.wait = require_number("wait", wait, low=0)
        self.half_life = require_number("half_life", half_life, low=0)
        self._attained: dict[str | None, tuple[float, float]] = {}  # and when it was so much
        self._waiting: dict[Request, None] = {}
        self._ended: list[tuple[Request, float]] = []  # since ranks were last computed
        self._changed = False  # whether anything has happened since then
        self._now = 0.0  # when that was
        self._services = self._arrivals = (0.0, 0.0)  # least and most of the programs that wait

    def attained(self, program: str | None, now: float) -> float:
        """What a program has had, as it counts at a time."""
        tokens, since = self._attained.get(program, (0.0, now))
        return tokens * 2 ** ((since - now) / self.half_life) if self.half_life else tokens

    def rank(self, request: Request, state: ServerState) -> float:
        # All services decay by the same factor and all waits grow by the same time, so that scaled
        # ones change with events alone.
        assert request.arrival is not None
        had = _scaled(self.attained(request.session, self._now), *self._services)
        return self.service * had + self.wait * _scaled(request.arrival, *self._arrivals)

    def stale(self, state: ServerState) -> bool:
        if not self._changed:
            return False
        self._changed, self._now = False, state.now
        for request, now in self._ended:
            tokens = request.prompt_len + OUTPUT * request.generated
            self._attained[request.session] = self.attained(request.session, now) + tokens, now
        self._ended.clear()
        first: dict[str | None, float] = {}
        for request in self._waiting:
            assert request.arrival is not None
            first[request.session] = min(first.get(request.session, inf), request.arrival)
        services = [self.attained(program, state.now) for program in first] or [0.0]
        arrivals = list(first.values()) or [0.0]
        self._services = min(services), max(services)
        self._arrivals = min(arrivals), max(arrivals)
        return True

    def observe(self, event: Event) -> None:
        request, now = event
        self._changed = True
        if isinstance(event, (Arrived, Preempted)):
            self._waiting[request] = None
        elif isinstance(event, (Admitted, Left)):
            self._waiting.pop(request, None)
            if isinstance(event, Left) and request.state is State.FINISHED:
                self._ended.append((request, now))


def _scaled(value: float, least: float, most: float) -> float:
    """A value on the scale from `least`, which is 0, to `most`, which is 1."""
    return 0.5 if least == most else (value - least) / (most - least)
