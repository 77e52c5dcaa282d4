"""A policy from scratch: of two clients, the one that was served less goes first.

The policy keeps state: it observes every request that leaves, and counts its tokens. It then
serves the same requests as first come, first served, in the simulator.

    python docs/examples/policy_from_scratch.py
"""

from __future__ import annotations

from collections import Counter

import pagedsim as ps
from pagedsim.core import Event, Left, Request, ServerState


class LeastServed(ps.Policy):
    """The client whose finished requests took the fewest tokens goes first."""

    rank_changes = "always"  # what a client has had changes while its requests wait

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()

    def rank(self, request: Request, state: ServerState) -> float:
        return self.tokens[request.client]

    def observe(self, event: Event) -> None:
        if isinstance(event, Left):
            self.tokens[event.request.client] += event.request.prompt_len + event.request.generated


def main() -> None:
    """Print the mean time to first token of each client, a line for each policy."""
    clients = {"heavy": 0.9, "light": 0.1}  # nine of ten requests are of one client
    result = ps.compare(
        {"memory.blocks": 2000, "server.max_seqs": 16},
        policy={"fcfs": "fcfs", "least served": LeastServed()},
        workload=ps.synthetic(requests=300, rate=10, client=clients),
        seeds=1,
    )
    for run in result.runs:
        ttft = {client: own["ttft_mean"] for client, own in run.summary["clients"].items()}
        print(f"{run.arm:12}  " + ", ".join(f"{name}: {ttft[name]:.2f} s" for name in sorted(ttft)))


if __name__ == "__main__":
    main()
