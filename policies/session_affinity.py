"""A session's next call goes first while its prefix is cached, within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import islice
from math import inf

from pagedsim.core import Admitted, Arrived, Event, Policy, Preempted, Request, ServerState
from pagedsim.core.errors import require_number, require_whole
from pagedsim.core.policy import RankChanges


class SessionAffinity(Policy):
    """First come, first served, but one call a step, of a session that ran lately and has blocks in
    the prefix cache, goes first.

    It is one of the first `window` that wait, with `min_blocks` cached blocks or more, and of a
    session that was in the batch within the last `ttl` seconds: the one with the most cached
    blocks, of these that of the session that ran last. Nobody overtakes a preempted request, nor
    the first of the queue once it has waited for `max_wait` seconds. A call that does not start in
    its step is back at its place. The proposal's defaults are not known: these are ours.
    """

    paper = "rules of vLLM's proposed session-affinity scheduler (vllm-project/vllm, 51384)"
    needs = ("session", "prompts")
    rank_changes: RankChanges = "when stale"
    displacing = False

    def __init__(
        self, window: int = 32, min_blocks: int = 1, max_wait: float = 0.5, ttl: float = 60.0
    ) -> None:
        self.window = require_whole("window", window, 1)
        self.min_blocks = require_whole("min_blocks", min_blocks, 1)
        self.max_wait = require_number("max_wait", max_wait, low=0)
        self.ttl = require_number("ttl", ttl, low=0)
        self._promoted: Request | None = None
        self._waiting: dict[Request, None] = {}  # in order of arrival
        self._preempted: dict[Request, None] = {}  # and not admitted since
        self._running: Counter[str] = Counter()  # requests in the batch by session
        self._left: dict[str, float] = {}  # when sessions left the batch, the longest ago first

    def rank(self, request: Request, state: ServerState) -> int:
        return -1 if request.preemptions else int(request is not self._promoted)

    def stale(self, state: ServerState) -> Collection[Request]:
        if state.sequences >= state.max_seqs:
            return ()  # nobody starts
        before, self._promoted = self._promoted, self._next(state)
        changed = (before, self._promoted) if before is not self._promoted else ()
        return [request for request in changed if request is not None]

    def _next(self, state: ServerState) -> Request | None:
        """The call to promote in this step."""
        if self._preempted or len(self._waiting) < 2:
            return None
        head, *others = islice(self._waiting, self.window)
        assert head.arrival is not None
        if state.now - head.arrival >= self.max_wait:
            return None
        best, chosen = (0, -inf), None
        for request in others:
            ran = self._last_ran(request.session, state.now)
            if ran < state.now - self.ttl:
                continue
            blocks = state.cached_tokens(request) // state.block_size
            if blocks >= self.min_blocks and (blocks, ran) > best:
                best, chosen = (blocks, ran), request
        return chosen

    def _last_ran(self, session: str | None, now: float) -> float:
        """When a session was last in the batch: infinity if it is, or minus infinity if never."""
        if session is None:
            return -inf
        return inf if self._running[session] else self._left.get(session, -inf)

    def observe(self, event: Event) -> None:
        request, now = event
        if isinstance(event, Arrived):
            (self._preempted if request.preemptions else self._waiting)[request] = None
            return
        queues = [queue for queue in (self._waiting, self._preempted) if request in queue]
        for queue in queues:
            del queue[request]
        if isinstance(event, Preempted):
            self._preempted[request] = None
        if request.session is None:
            return
        if isinstance(event, Admitted):
            self._running[request.session] += 1
        elif not queues:
            self._leave(request.session, now)

    def _leave(self, session: str, now: float) -> None:
        """A request of a session left the batch."""
        self._running[session] -= 1
        if not self._running[session]:
            del self._running[session]
        self._left.pop(session, None)
        self._left[session] = now
        while self._left[oldest := next(iter(self._left))] < now - self.ttl:
            del self._left[oldest]
