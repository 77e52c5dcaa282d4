"""What policies that are fair to clients keep of each: who waits, and what they are given."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from pagedsim.core import Admitted, Arrived, ConfigError, Event, Preempted, Request
from pagedsim.core.errors import require_number


class Clients:
    """The requests of each client that wait, and those that run with the tokens settled so far."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()
        self._running: defaultdict[str, dict[Request, int]] = defaultdict(dict)

    @property
    def who_wait(self) -> Collection[str]:
        """Clients with a request that waits."""
        return self._waiting.keys()

    def waits(self, client: str) -> bool:
        """Whether any of its requests waits."""
        return client in self._waiting

    def pending(self, client: str) -> int:
        """Tokens that its running requests have generated and that were not settled yet."""
        return sum(one.generated - known for one, known in self._running[client].items())

    def observe(self, event: Event) -> int:
        """Take note of it; returns tokens that are settled by it."""
        request, client = event.request, event.request.client
        running = self._running[client]
        if isinstance(event, Arrived):
            self._waiting[client] += 1
            return 0
        if isinstance(event, Admitted):
            running[request] = request.generated
            self._leave(client)
            return 0
        if request not in running:  # it left while it waited
            self._leave(client)
            return 0
        if isinstance(event, Preempted):
            self._waiting[client] += 1
        return request.generated - running.pop(request)

    def _leave(self, client: str) -> None:
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._waiting[client]


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
