"""Routers that need no prefixes and no memory of their own: in turns, at random, by load."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from random import Random

from pagedsim.core import Request
from pagedsim.core.errors import require_whole
from pagedsim.policies.routing.router import Replica, Replicas, Router


def prefill_backlog(replica: Replica, more: int = 0) -> float:
    """Seconds for all prompt tokens that a replica owes, and `more`, in full steps.

    One step's time for all of them would count attention across prompts that do not see each other.
    """
    owed = replica.owed_tokens + more
    if not owed:
        return 0.0
    step = min(owed, replica.max_batched_tokens)
    return replica.prefill_seconds(step) * (owed / step)


class RoundRobin(Router):
    """Each replica in turn, whatever its load."""

    paper = "what a load balancer does without any state of the replicas"

    blind = True

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        turn = self._sent[replicas.role]
        self._sent[replicas.role] = turn + 1
        return replicas[turn % len(replicas)]


class Uniform(Router):
    """A replica at random, uniformly."""

    paper = "the baseline of every other rule"

    blind = True

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(require_whole("seed", seed, 0))

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return replicas[int(self._random.random() * len(replicas))]


class PowerOfTwo(Router):
    """The fewest requests among `choices` replicas drawn at random.

    Of equals, the first that was drawn. With as many choices as replicas it is `least_requests`,
    but for ties.
    """

    paper = "Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE TPDS 2001"

    def __init__(self, choices: int = 2, seed: int = 0) -> None:
        self.choices = require_whole("choices", choices, 1)
        self._random = Random(require_whole("seed", seed, 0))

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        count = len(replicas)
        drawn = self._random.sample(range(count), min(self.choices, count))
        return min(map(replicas.__getitem__, drawn), key=attrgetter("requests"))


fewest_requests = attrgetter("requests")
"""The load by which several routers break ties."""


class LeastRequests(Router):
    """The fewest requests, waiting and running; of equals, the first."""

    paper = "Winston, Optimality of the Shortest Line Discipline, J. Applied Probability 1977"

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return min(replicas, key=fewest_requests)


class LeastTokens(Router):
    """The fewest tokens: of prompts still to be computed, and in memory of those that decode."""

    paper = (
        "the join-the-shortest-queue by tokens of Patel et al., Splitwise, ISCA 2024 (2311.18677)"
    )

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return min(replicas, key=lambda replica: replica.owed_tokens + replica.stored_tokens)


class LeastWork(Router):
    """The replica that would finish its requests and this one first, without further arrivals.

    Work is seconds of that replica: prompts that are owed at the speed of a full step, then
    predicted tokens (else `max_tokens`) in steps as full as it may be. So a fast replica gets more
    than a slow one.
    """

    paper = "the least work left, Harchol-Balter et al., Sizing Policies for Server Farms, 1999"

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        tokens = request.predicted_len or request.max_tokens or 0
        prompt = 0 if replicas.role == "decode" else request.num_tokens
        context = request.num_tokens

        def seconds(replica: Replica) -> float:
            sequences = min(replica.requests + 1, replica.max_seqs)
            steps = (replica.predicted_tokens + tokens) / sequences
            step = replica.decode_seconds(sequences, replica.stored_tokens + context)
            return prefill_backlog(replica, prompt) + steps * step

        return min(replicas, key=seconds)


class Central(Router):
    """The fewest requests; None while every replica has `slots` of them (default: `max_seqs`).

    With one slot a replica is a server, and the fleet an M/M/N queue for such times.
    """

    paper = "Erlang 1917: M/M/N, the queue that no other order of dispatch beats in the mean"

    holds = True

    def __init__(self, slots: int | None = None) -> None:
        self.slots = None if slots is None else require_whole("slots", slots, 1)

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica | None:
        chosen, least = None, 0
        for replica in replicas:
            requests = replica.requests
            room = requests < (self.slots or replica.max_seqs)
            if room and (chosen is None or requests < least):
                chosen, least = replica, requests
        return chosen
