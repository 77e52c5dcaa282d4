"""Fairness among clients: the virtual token counter, and deficit round robin."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from math import ceil

from pagedsim.core import (
    Admitted,
    Arrived,
    ConfigError,
    Event,
    Policy,
    Preempted,
    Request,
    ServerState,
)
from pagedsim.core.errors import require_number
from pagedsim.core.request import State


class Clients:
    """The waiting requests of each client, and the running ones with the tokens charged so far.

    `state` is the server's, one object throughout, set by the policy's first call.
    """

    def __init__(self, weights: object = None) -> None:
        self.weights = weights_of(weights)
        self.state: ServerState | None = None
        self.last_to_wait: Collection[str] = ()
        """The client whose waiting requests were the last to run out; empty at first."""
        self._waiting: Counter[str] = Counter()
        self._new: set[Request] = set()
        self._running: dict[Request, int] = {}
        self._settled: Counter[str] = Counter()  # the sum of these, by client

    @property
    def waiting_clients(self) -> Collection[str]:
        return self._waiting.keys()

    def waits(self, client: str) -> bool:
        return client in self._waiting

    def share(self, client: str) -> float:
        return self.weights.get(client, 1.0)

    def pending(self, client: str) -> int:
        """Tokens that its running requests have generated and that are not charged yet."""
        if self.state is None:
            return 0
        return self.state.generated_by(client) - self._settled[client]

    def observe(self, event: Event) -> int:
        """Update by an event; returns the tokens that it charges."""
        request, client = event.request, event.request.client
        if isinstance(event, Arrived):
            self._waiting[client] += 1
            if request.state is State.RUNNING:  # migrated: it is in the batch by now
                self._join(request)
            else:
                self._new.add(request)
            return 0
        if isinstance(event, Admitted):
            self._new.discard(request)
            if not self.brought(request):
                self._join(request)
            self._leave(client)
            return 0
        if request not in self._running:  # it left from the queue
            self._new.discard(request)
            self._leave(client)
            return 0
        if isinstance(event, Preempted):
            self._waiting[client] += 1
        known = self._running.pop(request)
        self._settled[client] -= known
        return request.generated - known

    def brought(self, request: Request) -> bool:
        """Whether a request that is about to be admitted migrated here with its keys and values."""
        return request in self._running

    def owes_prompt(self, request: Request) -> bool:
        """Whether its prompt is to be charged when it is admitted: once on each server that
        computes it, however often it is preempted there."""
        return request in self._new

    def _join(self, request: Request) -> None:
        self._running[request] = request.generated
        self._settled[request.client] += request.generated

    def _leave(self, client: str) -> None:
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._waiting[client]
            self.last_to_wait = (client,)


def weights_of(weights: object) -> dict[str, float]:
    """The weights of clients, checked; a client that is not named has 1."""
    if weights is None:
        return {}
    if not isinstance(weights, Mapping):
        raise ConfigError(f"weights={weights}: must be numbers by client, as in {{a: 2}}")
    return {
        str(client): require_number(f"weights.{client}", weight, above=0)
        for client, weight in weights.items()
    }


class VTC(Policy):
    """The oldest request of the least served client goes first; none is skipped.

    Served are `prompt` for each token of a prompt when it is admitted and `output` for each token
    generated, over the client's weight. A client that returns is lifted to the least served of
    those that wait, or, if none waits, to the last that had a request waiting, so that it saves
    nothing up. Clients with requests waiting then differ by at most
    2 × max(prompt × longest prompt, output × tokens in memory).
    """

    paper = "Sheng et al., Fairness in Serving Large Language Models, OSDI 2024 (2401.00588)"
    needs = ("client",)
    by_client = True
    displacing = False

    def __init__(
        self,
        prompt: float = 1.0,
        output: float = 2.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.prompt = require_number("prompt", prompt, 0)
        self.output = require_number("output", output, 0)
        self._clients = Clients(weights)
        self.weights = self._clients.weights
        self._served: defaultdict[str, float] = defaultdict(float)

    def service(self, client: str) -> float:
        """What a client has had so far."""
        return self._served[client] + self._worth(client, 0, self._clients.pending(client))

    def _worth(self, client: str, prompt: int, output: int) -> float:
        """What so many tokens are as service of a client."""
        return (self.prompt * prompt + self.output * output) / self._clients.share(client)

    def rank(self, request: Request, state: ServerState) -> float:
        self._clients.state = state
        return self.service(request.client)

    def observe(self, event: Event) -> None:
        clients, request, client = self._clients, event.request, event.request.client
        behind: Collection[str] = ()
        if isinstance(event, Arrived) and not clients.waits(client):
            behind = tuple(clients.waiting_clients) or clients.last_to_wait
        elif isinstance(event, Admitted) and clients.owes_prompt(request):
            self._served[client] += self._worth(client, request.prompt_len, 0)
        self._served[client] += self._worth(client, 0, clients.observe(event))
        if behind:
            least = min(map(self.service, behind))
            self._served[client] += max(least - self.service(client), 0.0)


class DRR(Policy):
    """Clients take turns; each turn adds `quantum` tokens to what a client may spend.

    A request starts in its client's turn once the prompt fits into what the client has; what it
    generates is spent afterwards. A client with nothing waiting keeps no savings.
    """

    paper = "Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin, 1996"
    needs = ("client",)
    by_client = True
    displacing = False

    def __init__(self, quantum: float = 512.0, weights: Mapping[str, float] | None = None) -> None:
        self.quantum = require_number("quantum", quantum, above=0)
        self._clients = Clients(weights)
        self.weights = self._clients.weights
        self._ring: dict[str, float] = {}  # the deficit of each, in the order of turns
        self._places: dict[str, int] = {}  # of each in that order; empty: unknown

    def rank(self, request: Request, state: ServerState) -> tuple[float, float]:
        """Turns until it can start, and its client's place in the round."""
        self._clients.state = state
        places = self._places
        if len(places) != len(self._ring):
            places = self._places = {client: place for place, client in enumerate(self._ring)}
        turns = self._turns(request, self._clients.pending(request.client))
        return (turns, places.get(request.client, len(places)))

    def _turns(self, request: Request, pending: int) -> int:
        """Turns of its client until it can start."""
        client = request.client
        lacking = request.prompt_len - self._ring.get(client, 0.0) + pending
        return max(ceil(lacking / self._quantum(client)), 0)

    def _quantum(self, client: str) -> float:
        return self.quantum * self._clients.share(client)

    def observe(self, event: Event) -> None:
        client = event.request.client
        if isinstance(event, Arrived):
            self._ring.setdefault(client, 0.0)
        elif isinstance(event, Admitted) and not self._clients.brought(event.request):
            # A request with its keys and values had its turn where its prompt was computed.
            self._take_turns(event.request)
        spent = self._clients.observe(event)
        if client in self._ring:
            self._ring[client] -= spent
            if not self._clients.waits(client):
                # Savings first cover what its running requests have generated.
                self._ring[client] = min(self._ring[client], self._clients.pending(client))

    def _take_turns(self, request: Request) -> None:
        """Take all turns until this request starts, and charge its prompt."""
        client = request.client
        # It is in the batch by now, but what it said before was settled then.
        turns = self._turns(request, self._clients.pending(client) - request.generated)
        passed = turns
        for other in tuple(self._ring):
            if self._clients.waits(other):
                self._ring[other] += passed * self._quantum(other)
            if other == client:
                passed = max(turns - 1, 0)
        if self._clients.owes_prompt(request):
            self._ring[client] -= request.prompt_len
        if turns:
            self._places = {}
        while turns:  # the round goes on behind it
            other = next(iter(self._ring))
            self._ring[other] = self._ring.pop(other)
            if other == client:
                break
