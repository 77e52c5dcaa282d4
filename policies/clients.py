"""What policies that are fair to clients keep of each: who waits, and what they are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from pagedsim.core import Admitted, Arrived, ConfigError, Event, Preempted, Request, ServerState
from pagedsim.core.errors import require_number
from pagedsim.core.request import State


class Clients:
    """The requests of each client that wait, and those that run with the tokens settled so far.

    `state` is the server's, one object all the time, once a policy was shown it.
    """

    def __init__(self, weights: object = None) -> None:
        self.weights = weights_of(weights)
        self.state: ServerState | None = None
        self.last_to_wait: Collection[str] = ()
        """The client that was the last to have no request waiting any more; none at first."""
        self._waiting: Counter[str] = Counter()
        self._new: set[Request] = set()
        self._running: dict[Request, int] = {}
        self._settled: Counter[str] = Counter()  # the sum of these, by client

    @property
    def who_wait(self) -> Collection[str]:
        """Clients with a request that waits."""
        return self._waiting.keys()

    def waits(self, client: str) -> bool:
        """Whether any of its requests waits."""
        return client in self._waiting

    def share(self, client: str) -> float:
        """Its weight."""
        return self.weights.get(client, 1.0)

    def pending(self, client: str) -> int:
        """Tokens that its running requests have generated and that were not settled yet."""
        if self.state is None:
            return 0
        return self.state.generated_by(client) - self._settled[client]

    def observe(self, event: Event) -> int:
        """Take note of it; returns tokens that are settled by it."""
        request, client = event.request, event.request.client
        if isinstance(event, Arrived):
            self._waiting[client] += 1
            if request.state is State.RUNNING:  # with keys and values: it is in the batch by now
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
        if request not in self._running:  # it left while it waited
            self._new.discard(request)
            self._leave(client)
            return 0
        if isinstance(event, Preempted):
            self._waiting[client] += 1
        known = self._running.pop(request)
        self._settled[client] -= known
        return request.generated - known

    def brought(self, request: Request) -> bool:
        """Whether a request that is about to be admitted came with its keys and values."""
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
