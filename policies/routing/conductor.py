"""Mooncake's conductor: the soonest first token, and refusals before it is too late."""

from __future__ import annotations

from math import ceil, inf

from pagedsim.core import Request
from pagedsim.core.errors import require_number, unknown
from pagedsim.policies.routing.router import Answer, Refusal, Replica, Replicas, Router
from pagedsim.policies.routing.simple import prefill_backlog

REFUSES = ("predicted", "now", "late")
"""When a request is refused for the answers' sake; see `Conductor`."""


class Conductor(Router):
    """The replica that is to give the first token the soonest, by queue, prefix and prefill.

    With `fleet.fetch=sooner` it weighs fetching a prefix from another replica, as the paper's does,
    by its time and not by a ratio of lengths. `ttft` and `tbt` are the objectives in seconds, of a
    first token and of the time between tokens; null: none. A request that would miss `ttft` is
    refused on arrival.

    One that would miss `tbt` is refused at `refuse`: "late", when its first token is out and the
    one that is to decode would be too slow with it; "now", on arrival, by those who decode now;
    "predicted", on arrival, by those who will when it comes to decode: those whose prompts are
    computed before, less those that decode for longer than `stay` seconds then. Requests are taken
    to be spread evenly, as the paper does. The decode replica is the fastest with the request.
    """

    paper = "Qin et al., Mooncake, FAST 2025 (2407.00079), its algorithm 1 and section 7"

    def __init__(
        self,
        ttft: float | None = None,
        tbt: float | None = None,
        refuse: str = "predicted",
        stay: float = 10.0,
    ) -> None:
        self.ttft = inf if ttft is None else require_number("ttft", ttft, above=0)
        self.tbt = inf if tbt is None else require_number("tbt", tbt, above=0)
        if refuse not in REFUSES:
            raise unknown("refuse", str(refuse), REFUSES)
        self.refuse = refuse
        self.stay = require_number("stay", stay, above=0)

    def route(self, request: Request, replicas: Replicas, now: float) -> Answer:
        if replicas.role == "decode":
            return self._decoder(request, replicas)
        seconds, prefiller = _prefiller(request, replicas)
        if seconds > self.ttft:
            return Refusal(f"its first token would take {seconds:.3g} s: more than {self.ttft:g} s")
        if self.tbt < inf and self.refuse != "late":
            between = self._between(request, replicas, now, now + seconds)
            if between > self.tbt:
                return _too_slow(between, self.tbt)
        return prefiller

    def _decoder(self, request: Request, replicas: Replicas) -> Replica | Refusal:
        def between(replica: Replica) -> float:
            sequences = replica.running + replica.waiting + 1
            return replica.decode_seconds(sequences, replica.stored_tokens + request.num_tokens)

        best = min(replicas, key=between)
        if self.refuse == "late" and self.tbt < inf and (seconds := between(best)) > self.tbt:
            return _too_slow(seconds, self.tbt)
        return best

    def _between(self, request: Request, replicas: Replicas, now: float, then: float) -> float:
        """The time between tokens when this request comes to decode."""
        pool = [replica for replica in replicas.all_replicas if replica.role != "prefill"]
        running = sum(replica.running for replica in pool)
        tokens = sum(replica.stored_tokens for replica in pool)
        if self.refuse == "now":
            sequences = running
        else:
            since = then - self.stay
            sequences = sum(
                served.first_token_at is None or served.first_token_at > since
                for replica in pool
                for served in replica.batch
            )
            coming = sum(
                replica.requests for replica in replicas.all_replicas if replica.role == "prefill"
            )
            # Their first tokens are spread over the time until then: the early ones will have left.
            sequences += ceil(coming * min(self.stay / (then - now), 1.0) if then > now else coming)
            sequences += sum(replica.waiting for replica in pool)
        context = tokens / running if running else request.num_tokens
        share = ceil((sequences + 1) / len(pool))
        return max(replica.decode_seconds(share, round(share * context)) for replica in pool)


def _prefiller(request: Request, replicas: Replicas) -> tuple[float, Replica]:
    """The replica with the soonest first token, and its delay."""
    prefills = replicas.prefill_seconds(request)
    seconds = [
        prefill_backlog(replica) + prefill
        for replica, prefill in zip(replicas, prefills, strict=True)
    ]
    soonest = min(seconds)
    return soonest, replicas[seconds.index(soonest)]


def _too_slow(seconds: float, most: float) -> Refusal:
    return Refusal(f"its tokens would take {seconds:.3g} s each: more than {most:g} s")
