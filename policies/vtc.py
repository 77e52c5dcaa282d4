"""The virtual token counter: clients are served evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from pagedsim.core import Admitted, Arrived, Event, Policy, Request, ServerState
from pagedsim.core.errors import require_number
from policies.clients import Clients


class VTC(Policy):
    """The client that was served least goes first, its oldest request; nobody is skipped.

    Served are `prompt` for each token of a prompt when it is admitted and `output` for each token
    generated, over the client's weight. A client that comes back is lifted to the least served of
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
            behind = tuple(clients.who_wait) or clients.last_to_wait
        elif isinstance(event, Admitted) and clients.owes_prompt(request):
            self._served[client] += self._worth(client, request.prompt_len, 0)
        self._served[client] += self._worth(client, 0, clients.observe(event))
        if behind:
            least = min(map(self.service, behind))
            self._served[client] += max(least - self.service(client), 0.0)
