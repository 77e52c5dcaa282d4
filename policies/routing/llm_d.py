"""llm-d's weighted scorers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pagedsim.core import Request
from pagedsim.core.errors import ConfigError, require_number, require_whole
from pagedsim.policies.routing.prefixes import prefixes
from pagedsim.policies.routing.router import Replica, Replicas, Router


class LlmD(Router):
    """The highest sum of scores, each from 0 to 1 times its weight; of equals, any.

    `prefix` is the part of the prompt that a replica has. `queue` falls from 1 at the shortest
    waiting queue to 0 at the longest, and is 1 where all are equal. `kv` is the part of memory that
    is free. `load` falls from 0.5 to 0 at `queue_threshold` requests waiting. With `known=cached`
    it is llm-d's precise prefix cache scorer, in which a token in host memory counts `host`, with
    `known=sent` the approximate one, which compares blocks of 64 tokens. With disaggregation, the
    decode replica is chosen without the prefix.
    """

    paper = "llm-d, the scorers of its inference scheduler and of optimized-baseline, its guide"

    def __init__(
        self,
        prefix: float = 3.0,
        queue: float = 2.0,
        kv: float = 2.0,
        load: float = 0.0,
        queue_threshold: int = 128,
        known: str = "sent",
        host: float = 0.8,
        seed: int = 0,
    ) -> None:
        self.prefix = require_number("prefix", prefix, 0)
        self.queue = require_number("queue", queue, 0)
        self.kv = require_number("kv", kv, 0)
        self.load = require_number("load", load, 0)
        if not (prefix or queue or kv or load):
            raise ConfigError("prefix=0: must be above 0 where queue, kv and load are 0, too")
        self.queue_threshold = require_whole("queue_threshold", queue_threshold, 1)
        self._prefixes = prefixes(known)
        self.host = require_number("host", host, 0, high=1)
        self._sees_host = host > 0 and known == "cached"
        self._random = Random(require_whole("seed", seed, 0))

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        prefix = self.prefix and replicas.role != "decode"
        matched = self._prefixes.tokens(request, replicas) if prefix else ()
        scores = self._scores(request, replicas, matched)
        best = max(scores)
        equal = [at for at, score in enumerate(scores) if score == best]
        chosen = replicas[equal[0] if len(equal) == 1 else self._random.choice(equal)]
        if prefix:
            self._prefixes.sent(request, chosen)
        return chosen

    def _scores(self, request: Request, replicas: Replicas, matched: Sequence[int]) -> list[float]:
        waiting = [replica.waiting for replica in replicas]
        longest = max(waiting)
        spread = longest - min(waiting)
        scores = []
        for at, replica in enumerate(replicas):
            score = self.queue * ((longest - waiting[at]) / spread if spread else 1.0)
            if self.kv:
                score += self.kv * replica.free_blocks / replica.total_blocks
            if self.load:
                full = min(waiting[at], self.queue_threshold) / self.queue_threshold
                score += self.load * 0.5 * (1.0 - full)
            if matched:
                tokens: float = matched[at]
                if self._sees_host:
                    tokens += self.host * replica.host_tokens(request, matched[at])
                score += self.prefix * tokens / request.prompt_len
            scores.append(score)
        return scores
