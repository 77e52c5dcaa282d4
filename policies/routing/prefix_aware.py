"""The longest prefix, unless that is short or its replica is crowded."""

from __future__ import annotations

from pagedsim.core import Request
from pagedsim.core.errors import require_number, require_whole
from pagedsim.policies.routing.prefixes import Sent, prefixes
from pagedsim.policies.routing.router import Replica, Replicas, Router
from pagedsim.policies.routing.simple import fewest_requests


class PrefixAware(Router):
    """The replica with the longest prefix, if that is more than `cache_threshold` of the prompt.

    If not, the one to which the fewest tokens were sent (`known=sent`), else the one with the
    most free memory. While the most and the fewest requests of a replica are more than
    `balance_abs` apart and by more than the factor `balance_rel`, the fewest requests decide.
    SGLang's router goes by what it sent, too, and compares characters, not tokens. Where prefill
    and decode are apart, the fewest requests choose the decode replica.
    """

    paper = "Zheng et al., SGLang (2312.07104); the rule of its router's policy cache_aware"

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        known: str = "sent",
    ) -> None:
        self.cache_threshold = require_number("cache_threshold", cache_threshold, 0, 1)
        self.balance_abs = require_whole("balance_abs", balance_abs, 0)
        self.balance_rel = require_number("balance_rel", balance_rel, 1)
        self._prefixes = prefixes(known)

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        if replicas.role == "decode":
            return min(replicas, key=fewest_requests)
        loads = [replica.requests for replica in replicas]
        most, fewest = max(loads), min(loads)
        if most - fewest > self.balance_abs and most > self.balance_rel * fewest:
            chosen = replicas[loads.index(fewest)]
        else:
            chosen = self._by_prefix(request, replicas)
        self._prefixes.sent(request, chosen)
        return chosen

    def _by_prefix(self, request: Request, replicas: Replicas) -> Replica:
        matched = self._prefixes.tokens(request, replicas)
        longest = max(matched)
        if longest > self.cache_threshold * request.prompt_len:
            return replicas[matched.index(longest)]
        if isinstance(self._prefixes, Sent):
            return min(replicas, key=self._prefixes.size)
        return max(replicas, key=lambda replica: replica.free_blocks - replica.wanted_blocks)
