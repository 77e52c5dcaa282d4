"""How long a replica takes for what it has to do, as routers estimate it."""

from __future__ import annotations

from policies.routing.router import Replica


def prefill_backlog(replica: Replica, more: int = 0) -> float:
    """Seconds for all prompt tokens that a replica owes, and some more, in steps as full as it
    may make them.

    One step's time for all of them would count attention across prompts that do not see each other.
    """
    owed = replica.owed_tokens + more
    if not owed:
        return 0.0
    step = min(owed, replica.max_batched_tokens)
    return replica.prefill_seconds(step) * (owed / step)
