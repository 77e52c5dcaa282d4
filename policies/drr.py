"""Deficit round robin among clients."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from pagedsim.core import Admitted, Arrived, Event, Policy, Request, ServerState
from pagedsim.core.errors import require_number
from policies.clients import Clients


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
        self._ring: dict[str, float] = {}  # what each may spend, in the order of their turns
        self._places: dict[str, int] = {}  # of each in that order; empty: not known

    def rank(self, request: Request, state: ServerState) -> tuple[float, float]:
        """Turns until it can start, and its client's place in the round."""
        self._clients.state = state
        places = self._places
        if len(places) != len(self._ring):
            places = self._places = {client: place for place, client in enumerate(self._ring)}
        turns = self._turns(request, self._clients.pending(request.client))
        return (turns, places.get(request.client, len(places)))

    def _turns(self, request: Request, pending: int) -> int:
        """How often its client's turn must come before it can start."""
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
        """Give all the turns that pass until this one starts, and let it pay for its prompt."""
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
