"""References of the policies that are fair to clients: VTC and DRR."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from pagedsim.core import Admitted, Arrived, Request, ServerState
from pagedsim.core.request import State
from tests.policies.reference.log import Entry, Logged, queued


class OfClients(Logged):
    """A policy that ranks clients: of each, the first request in its queue is next."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.weights = weights or {}

    def weight(self, client: str) -> float:
        return self.weights.get(client, 1.0)

    def queue(self, request: Request) -> list[Request]:
        """The queue in which a request stands; itself alone where it runs or just arrives."""
        here = [one for one in queued(self.log, request.client) if one.state is State.WAITING]
        return here if request in here else [request]

    def prompt_is_due(self, place: int) -> bool:
        """Whether an admission is the one for which a prompt is paid.

        It is paid once on each server that computes it: not after a preemption, nor where a
        request comes with its keys and values.
        """
        return isinstance(self.before(place).event, Arrived) and not self.brought(place)

    def before(self, place: int) -> Entry:
        """The last entry of a request before the one at `place`."""
        request = self.log[place].request
        return next(entry for entry in reversed(self.log[:place]) if entry.request is request)

    def brought(self, place: int) -> bool:
        """Whether a request is admitted with keys and values that it brought."""
        before = self.before(place)
        return isinstance(before.event, Arrived) and before.state is State.RUNNING

    def tokens(self, client: str, before: dict[Request, int], after: dict[Request, int]) -> int:
        """Tokens that a client's requests generated between two entries of the log."""
        there = [one for one in before if one.client == client and one in after]
        return sum(after[one] - before[one] for one in there)


class VTC(OfClients):
    """Sheng et al., algorithm 2, with a counter for each client.

    Here, other than there, a request that was preempted queues again.
    """

    def __init__(
        self,
        prompt: float = 1.0,
        output: float = 2.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(weights)
        self.prompt, self.output = prompt, output

    def rank(self, request: Request, state: ServerState) -> tuple[float, float, int]:
        self.state = state
        queue = self.queue(request)
        assert queue[0].arrival is not None
        counter = self.counters().get(request.client, 0.0)
        return (counter, queue[0].arrival, queue.index(request))

    def counters(self) -> dict[str, float]:
        """What each client was served by now."""
        counter: dict[str, float] = {}
        last: str | None = None  # the client that was the last to have nothing queued any more
        before: dict[Request, int] = {}
        for place, entry in enumerate(self.log):
            client = entry.request.client
            self._add_tokens(counter, before, entry.generated)
            before = entry.generated
            if isinstance(entry.event, Arrived) and not queued(self.log[:place], client):
                others = [one for one in counter if queued(self.log[:place], one)]
                others = others or ([last] if last else [])
                least = min((counter[one] for one in others), default=0.0)
                counter[client] = max(counter.get(client, 0.0), least)
            if isinstance(entry.event, Admitted) and self.prompt_is_due(place):
                counter[client] += self.prompt * entry.request.prompt_len / self.weight(client)
            if queued(self.log[:place], client) and not queued(self.log[: place + 1], client):
                last = client
        self._add_tokens(counter, before, self.generated())
        return counter

    def _add_tokens(
        self, counter: dict[str, float], before: dict[Request, int], after: dict[Request, int]
    ) -> None:
        for client in counter:
            tokens = self.tokens(client, before, after)
            counter[client] += self.output * tokens / self.weight(client)


class DRR(OfClients):
    """Shreedhar and Varghese, turn by turn.

    Here, other than there, the length of an output is not known: a prompt is paid when it is
    admitted, and its output token by token, so that a balance may fall below zero.
    """

    def __init__(self, quantum: float = 512.0, weights: Mapping[str, float] | None = None) -> None:
        super().__init__(weights)
        self.quantum = quantum

    def rank(self, request: Request, state: ServerState) -> tuple[float, float, float, int]:
        self.state = state
        client, queue = request.client, self.queue(request)
        ring, balance = self.round()
        has, turn = balance.get(client, 0.0), self.turn(client)
        turns = next(n for n in count() if has + n * turn >= queue[0].prompt_len)
        place = ring.index(client) if client in ring else len(ring)
        assert queue[0].arrival is not None
        return (turns, place, queue[0].arrival, queue.index(request))

    def turn(self, client: str) -> float:
        return self.quantum * self.weight(client)

    def round(self) -> tuple[list[str], dict[str, float]]:
        """Clients in the order of their turns, and the balance of each."""
        ring: list[str] = []
        balance: dict[str, float] = {}
        before: dict[Request, int] = {}
        for place, entry in enumerate(self.log):
            self._pay_tokens(balance, before, entry.generated)
            before, client = entry.generated, entry.request.client
            if client not in balance:
                ring.append(client)
                balance[client] = 0.0
            if isinstance(entry.event, Admitted):
                if not self.brought(place):
                    self._pass_turns(ring, balance, place)
                if self.prompt_is_due(place):
                    balance[client] -= entry.request.prompt_len
            if not queued(self.log[: place + 1], client):
                balance[client] = min(balance[client], 0.0)
        self._pay_tokens(balance, before, self.generated())
        return ring, balance

    def _pay_tokens(
        self, balance: dict[str, float], before: dict[Request, int], after: dict[Request, int]
    ) -> None:
        for client in balance:
            balance[client] -= self.tokens(client, before, after)

    def _pass_turns(self, ring: list[str], balance: dict[str, float], place: int) -> None:
        """Clients have their turns, one after another, until the request can be paid for."""
        request = self.log[place].request
        while balance[request.client] < request.prompt_len:
            client = ring.pop(0)
            if queued(self.log[:place], client):
                balance[client] += self.turn(client)
            ring.append(client)
