"""Classes of requests with objectives of their own for the time to the first token."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from pagedsim.core import ConfigError, Policy, Request, ServerState
from pagedsim.core.errors import require_flag, require_number
from pagedsim.core.policy import RankChanges

TARGETS = {0.0: 1.0, 1.0: 10.0}


class SLO(Policy):
    """The earliest due first token goes first: arrival plus the target of its class.

    `targets` has the seconds of each `priority`; of one that is not there, those of the next less
    urgent. With `shed` a request that waited longer than that before it began is rejected.
    """

    needs = ("priority",)
    rank_changes: RankChanges = "never"
    displacing = False

    def __init__(self, targets: Mapping[float, float] | None = None, shed: bool = False) -> None:
        self.targets = dict(sorted(_checked(TARGETS if targets is None else targets).items()))
        self.shed = require_flag("shed", shed)

    def due(self, request: Request) -> float:
        """When its first token is due; infinite for the least urgent of all."""
        assert request.arrival is not None
        for level, seconds in self.targets.items():
            if request.priority <= level:
                return request.arrival + seconds
        return inf

    def rank(self, request: Request, state: ServerState) -> float:
        return self.due(request)

    def should_reject(self, request: Request, state: ServerState) -> str | None:
        if not self.shed or state.now <= (due := self.due(request)):
            return None
        return f"its first token was due at {due:g} s"


def _checked(targets: object) -> dict[float, float]:
    if not isinstance(targets, Mapping) or not targets:
        raise ConfigError(
            f"targets={targets}: must be seconds by priority, such as {{0: 1, 1: 10}}"
        )
    bounds = {}
    for level, seconds in targets.items():
        try:
            number = float(level)  # keys of a mapping on a command line arrive as text
        except (TypeError, ValueError):
            raise ConfigError(f"targets.{level}: a priority must be a number") from None
        bounds[number] = require_number(f"targets.{level}", seconds, above=0)
    return bounds
