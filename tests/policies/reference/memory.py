"""References of the policies that go by memory: Past-Future and the longest prefix."""

from __future__ import annotations

from math import inf

from pagedsim.core import Left, Policy, Request, ServerState
from pagedsim.core.policy import PolicyWrapper
from pagedsim.core.request import State
from tests.policies.reference.log import Logged


class PastFuture(PolicyWrapper):
    """Admission by the peak of memory, which is found by decoding in thought, step by step."""

    def __init__(
        self, of: Policy | None = None, window: int = 200, reserve: float = 0.05, seed: int = 0
    ) -> None:
        super().__init__(of)
        self.window, self.reserve, self.seed = window, reserve, seed
        self.outputs: list[int] = []
        self.drawn: list[tuple[Request, float]] = []  # what cannot be computed again

    def admit(self, request: Request, state: ServerState) -> bool:
        if state.running:
            room = (state.total_blocks - 1) * state.block_size * (1 - self.reserve)
            if self.peak([*state.running, *state.swapped, request], state) > room:
                return False
        return self.inner.admit(request, state)

    def peak(self, batch: list[Request], state: ServerState) -> float:
        """Tokens in memory at most, last blocks counted whole, while nothing else is admitted."""
        left = {
            request: max(self.length(request, state) - request.generated - 1, 0)
            for request in batch
        }
        step, most = 0, 0.0
        while any(left[request] >= step for request in batch):
            growing = [request for request in batch if left[request] >= step]
            most = max(
                most,
                sum(request.num_seqs * (self.held(request, state) + step) for request in growing),
            )
            step += 1
        return most

    def held(self, request: Request, state: ServerState) -> int:
        """Tokens of each sequence now, or after its prefill, which generates one."""
        first = 0 if request.decoding else 1
        return request.prompt_len + request.generated + first + state.block_size - 1

    def length(self, request: Request, state: ServerState) -> float:
        """Its output, predicted or drawn from longer ones of the past; kept until it is reached."""
        said = request.generated
        for known, length in reversed(self.drawn):
            if known is request:
                if length > said:
                    return length
                break
        length = -inf if request.predicted_len is None else request.predicted_len
        if length <= said:
            longer = [output for output in self.outputs[-self.window :] if output > said]
            place = int(state.draw(request, self.seed) * len(longer))
            length = longer[place] if longer else inf
        length = min(length, state.longest_output(request))
        self.drawn.append((request, length))
        return length

    def observe(self, event: object) -> None:
        self.inner.observe(event)  # type: ignore[arg-type]
        if isinstance(event, Left) and event.request.state is State.FINISHED:
            self.outputs.append(event.request.generated)


class LongestPrefix(Logged):
    """The longest cached prefix first; a beginning that waiting requests share is computed once.

    Ranks are those at the beginning of a step, and are all computed there. Between two steps, where
    they decide nothing, they are as of now. Here, other than in SGLang, the first of those that
    share a beginning is the first to arrive, and a batch yields memory in order of arrival.
    """

    rank_changes = "when stale"
    short = 32

    def __init__(self, most: int = 128) -> None:
        super().__init__()
        self.most = most
        self.ranks: dict[Request, tuple[float, float]] = {}

    def stale(self, state: ServerState) -> bool:
        waiting = [one for one in self.came() if one.state is State.WAITING]
        many = len(waiting) > self.most
        self.ranks = {one: (0, 0) if many else self.live(one, state) for one in waiting}
        return True

    def rank(self, request: Request, state: ServerState) -> tuple[float, float]:
        if request.state is State.RUNNING or request.computed:
            return (-1, 0)
        return self.ranks[request] if request in self.ranks else self.live(request, state)

    def came(self) -> list[Request]:
        """The requests on this server, in order of arrival."""
        gone = [entry.request for entry in self.log if isinstance(entry.event, Left)]
        return [
            one for one in dict.fromkeys(entry.request for entry in self.log) if one not in gone
        ]

    def live(self, request: Request, state: ServerState) -> tuple[float, float]:
        return (1, 0) if self.shares(request, state) else (0, -state.cached_tokens(request))

    def shares(self, request: Request, state: ServerState) -> bool:
        """Whether a request that came sooner is to compute the same beginning first."""
        if not self.would_compute(request, state):
            return False
        beginning = request.tokens(0, self.short)
        for other in self.came():
            if other is request:
                return False
            alike = other.prompt is not None and other.tokens(0, self.short) == beginning
            if other.state is State.WAITING and alike and self.would_compute(other, state):
                return True
        return False

    def would_compute(self, request: Request, state: ServerState) -> bool:
        """Whether its beginning is long enough, known, and not in the cache."""
        length = request.prompt_len + request.sampled_count
        known = request.prompt is not None and length >= self.short
        return known and state.cached_tokens(request) <= self.short
