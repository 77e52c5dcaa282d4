"""Admission by what memory will be needed at most."""

from __future__ import annotations

from collections import deque
from math import ceil, inf
from operator import itemgetter

from pagedsim.core import Event, Left, Policy, Request, ServerState
from pagedsim.core.errors import require_number, require_whole
from pagedsim.core.request import State
from pagedsim.policies.admission import Refusal

Need = tuple[float, int, int]
"""Tokens that a request will still generate and keep, as it does all but the last; tokens that it
holds, its last blocks counted whole; and its sequences."""


class PastFuture(Refusal):
    """A request starts if memory will suffice at its peak, to which the batch and it will grow.

    Lengths are predicted ones, or else drawn from the last `window` outputs, among those that are
    longer than what a request has said already. `reserve` is the share of memory that stays free.
    With exact lengths no request is ever preempted.
    """

    paper = "Gong et al., Past-Future Scheduler, ASPLOS 2025 (2507.10150)"

    def __init__(
        self, of: Policy | None = None, window: int = 200, reserve: float = 0.05, seed: int = 0
    ) -> None:
        super().__init__(of)
        self.window = require_whole("window", window, 1)
        self.reserve = require_number("reserve", reserve, 0, below=1)
        self.seed = require_whole("seed", seed)
        self._outputs: deque[int] = deque(maxlen=self.window)
        self._lengths: dict[Request, float] = {}  # assumed output lengths

    def refuses(self, request: Request, state: ServerState) -> float | None:
        holders = [*state.running, *state.swapped]
        needs = self._needs([*holders, request], state)
        room = (state.total_blocks - 1) * state.block_size * (1 - self.reserve)
        excess = _peak(needs) - room
        if excess <= 0:
            return None
        # While the batch decodes, a newcomer would have a token less at its peak with each step;
        # until an output exceeds its assumed length.
        if not all(holder.decoding for holder in holders):
            return 1
        return int(min(ceil(excess / request.num_seqs), min(left for left, _, _ in needs)))

    def _needs(self, some: list[Request], state: ServerState) -> list[Need]:
        """What each of these needs."""
        lengths, rest, needs = self._lengths, state.block_size - 1, []
        for holder in some:
            said, width = holder.generated, holder.num_seqs
            length = lengths.get(holder, 0.0)
            if length <= said:
                length = lengths[holder] = self._length(holder, state)
            held = holder.prompt_len + said + rest
            if not holder.decoding:
                held += 1  # it first gets a token from the prompt
            left = length - said - 1
            needs.append((left if left > 0 else 0, width * held, width))
        return needs

    def _length(self, request: Request, state: ServerState) -> float:
        """Its assumed output length, above what it has generated."""
        said, length = request.generated, request.predicted_len
        if length is None or length <= said:
            longer = [output for output in self._outputs if output > said]
            draw = state.draw(request, self.seed)
            length = longer[int(draw * len(longer))] if longer else inf
        return min(length, state.longest_output(request))

    def observe(self, event: Event) -> None:
        super().observe(event)
        if isinstance(event, Left):
            self._lengths.pop(event.request, None)
            if event.request.state is State.FINISHED:
                self._outputs.append(event.request.generated)


def _peak(needs: list[Need]) -> float:
    """The peak of tokens in memory, over the ends of all requests."""
    peak = held = sequences = 0.0
    for left, tokens, width in sorted(needs, key=itemgetter(0), reverse=True):
        held += tokens
        sequences += width
        if (then := held + sequences * left) > peak:
            peak = then
    return peak
