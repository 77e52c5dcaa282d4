"""Orders of the waiting queue by one rule each, from first come, first served on."""

from __future__ import annotations

from math import inf

from pagedsim.core import Policy, Request, ServerState
from pagedsim.core.errors import require_flag
from pagedsim.core.policy import RankChanges


class FCFS(Policy):
    """In order of arrival; a preempted request returns to the front (vLLM's default)."""


class Priority(Policy):
    """A smaller `priority` goes first.

    `displace` says whether a waiting request may preempt a running one that is less urgent. The
    default is as in vLLM: under `batching=prefill_first` it may, and new arrivals take their place
    in the queue only in a step that admits none (0.6.6); under `batching=unified` it may not
    (0.33). With true or false, arrivals take their place at once.
    """

    needs = ("priority",)
    rank_changes: RankChanges = "never"

    def __init__(self, displace: bool | None = None) -> None:
        self.displacing = displace
        self.sorts_late = displace is None

    def rank(self, request: Request, state: ServerState) -> float:
        return request.priority


class SJF(Policy):
    """The shortest predicted output goes first; without a prediction a request goes last."""

    needs = ("predictor",)
    rank_changes: RankChanges = "never"
    displacing = False

    def rank(self, request: Request, state: ServerState) -> float:
        return inf if request.predicted_len is None else request.predicted_len


class LOF(Policy):
    """The longest output that a request may have goes first."""

    paper = "rules of SGLang's lof"
    rank_changes: RankChanges = "never"
    displacing = False

    def rank(self, request: Request, state: ServerState) -> float:
        return -state.longest_output(request)


class SRPT(Policy):
    """The fewest predicted tokens left go first, ahead of those that run if `displace` is true.

    With exact lengths no order has a lower mean response time on one server. A request
    beyond its prediction goes before all others.
    """

    paper = "Schrage, A Proof of the Optimality of the SRPT Discipline, Operations Research 1968"
    needs = ("predictor",)
    rank_changes: RankChanges = "while decoding"

    def __init__(self, displace: bool = True) -> None:
        self.displacing = require_flag("displace", displace)

    def rank(self, request: Request, state: ServerState) -> float:
        guess = request.predicted_len
        return inf if guess is None else guess - request.generated


class HRRN(Policy):
    """The longest wait for the fewest tokens to compute goes first: seconds waited a token.

    Cached tokens are not counted, so that no request waits long for little work.
    """

    paper = "Brinch Hansen, An Analysis of Response Ratio Scheduling, IFIP Congress 1971"
    rank_changes: RankChanges = "with time"
    displacing = False

    def __init__(self) -> None:
        self._changes = 0  # of the cache that ranks know of
        self._cached: dict[Request, int] = {}  # tokens of each since then

    def rank(self, request: Request, state: ServerState) -> float:
        assert request.arrival is not None
        return (request.arrival - state.now) / self._left(request, state)

    def speed(self, request: Request, state: ServerState) -> float:
        return -1 / self._left(request, state)

    def _left(self, request: Request, state: ServerState) -> int:
        if not self._changes:
            return max(1, request.num_tokens - state.cached_tokens(request))
        # A rank is the same throughout a step, whatever is admitted or evicted in it.
        if (cached := self._cached.get(request)) is None:
            cached = self._cached[request] = state.cached_tokens(request)
        return max(1, request.num_tokens - cached)

    def stale(self, state: ServerState) -> bool:
        known, self._changes = self._changes, state.cache_changes
        if known == self._changes:
            return False
        self._cached.clear()
        return True


class EDF(Policy):
    """The earliest deadline goes first; without a deadline a request goes last.

    It meets all deadlines of requests that arrive together whenever any order does. With `shed` a
    request is rejected if its deadline has passed before its start. With `displace` it may preempt
    running requests with later deadlines.
    """

    paper = "Liu and Layland, Scheduling Algorithms for Multiprogramming, JACM 1973"
    needs = ("deadline",)
    rank_changes: RankChanges = "never"

    def __init__(self, shed: bool = False, displace: bool = False) -> None:
        self.shed = require_flag("shed", shed)
        self.displacing = require_flag("displace", displace)

    def rank(self, request: Request, state: ServerState) -> float:
        return inf if request.deadline is None else request.deadline

    def should_reject(self, request: Request, state: ServerState) -> str | None:
        late = self.shed and request.deadline is not None and state.now > request.deadline
        return f"its deadline, {request.deadline:g} s, has passed" if late else None
