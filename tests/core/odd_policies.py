"""Policies that no one should serve with, each to exercise a hook of the interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from pagedsim.core import (
    Arrived,
    Event,
    Left,
    Policy,
    PreemptionMode,
    Request,
    ServerState,
    StepPlan,
)
from pagedsim.core.policy import RankChanges


class ShortestRemaining(Policy):
    """By predicted tokens left: a rank that changes while a request runs."""

    rank_changes: RankChanges = "while running"

    def __init__(self, displace: bool | None = False) -> None:
        self.displacing = displace

    def rank(self, request: Request, state: ServerState) -> float:
        return (request.predicted_len or 0) - request.generated


class Aging(Policy):
    """Each request gains on the others at a speed of its own: a rank that changes with time."""

    rank_changes: RankChanges = "always"

    def __init__(self, displace: bool | None = False) -> None:
        self.displacing = displace

    def rank(self, request: Request, state: ServerState) -> float:
        assert request.arrival is not None
        return request.priority - (state.now - request.arrival) * (1 + request._order % 3)


class RandomVictims(Policy):
    """Any request may be the victim, but the oldest only if it is the only one."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def choose_victim(
        self, running: Sequence[Request], needy: Request, state: ServerState
    ) -> Request:
        oldest = min(running, key=lambda request: request._order)
        return self.random.choice([r for r in running[:] if r is not oldest] or [oldest])


class Mixed(Policy):
    """One victim is swapped, the next recomputed, the third as `preemption=` says."""

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode | None:
        choices = (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE, None)
        return choices[(victim._order + victim.preemptions) % 3]


class SmallBatches(Policy):
    """Admits while fewer than `most` requests run."""

    def __init__(self, most: int) -> None:
        self.most = most

    def admit(self, request: Request, state: ServerState) -> bool:
        return len(state.running) < self.most


class OddBlocks(Policy):
    """Admits while the number of free blocks is odd, which taking a block changes."""

    def admit(self, request: Request, state: ServerState) -> bool:
        return state.free_blocks % 2 == 1 or not state.running


class Lottery(Policy):
    """Draws an order in each step, which requests may start, and which are rejected."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def rank(self, request: Request, state: ServerState) -> float:
        return state.draw(request, self.seed)

    def admit(self, request: Request, state: ServerState) -> bool:
        return state.draw(request, self.seed + 1) < 0.5 or not state.running

    def should_reject(self, request: Request, state: ServerState) -> str | None:
        return "unlucky" if state.draw(request, self.seed + 2) < 0.01 else None


class DisplacingLottery(Lottery):
    """Draws, too, which requests may displace others."""

    displacing = True

    def may_preempt(self, waiting: Request, running: Request, state: ServerState) -> bool:
        return state.draw(waiting, self.seed + 3) < 0.1


class Witness(Policy):
    """Keeps all that it observes."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event) -> None:
        self.events.append(event)


class Counting(Policy):
    """Counts what it observes."""

    def __init__(self) -> None:
        self.arrived = 0
        self.left = 0
        self.tokens: Counter[Request] = Counter()

    def observe(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self.arrived += 1
        elif isinstance(event, Left):
            self.left += 1

    def after_step(self, plan: StepPlan, state: ServerState) -> None:
        self.tokens.update(plan.decodes)
        self.tokens.update(c.request for c in plan.chunks if c.samples)
