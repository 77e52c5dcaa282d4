"""Admission by what memory will be needed at most."""

from __future__ import annotations

from collections import deque
from math import ceil, inf
from random import Random

from pagedsim.core import Event, Left, Policy, Request, ServerState
from pagedsim.core.errors import require_number, require_whole
from pagedsim.core.request import State
from policies.refusal import Refusal


class PastFuture(Refusal):
    """A request starts if memory will suffice at its peak, to which the batch and it will grow.

    Lengths are predicted ones, or else drawn from the last `window` outputs, among those that are
    longer than what a request has said already. `reserve` is the share of memory that stays free.
    With exact lengths nobody is ever preempted.
    """

    paper = "Gong et al., Past-Future Scheduler, ASPLOS 2025 (2507.10150)"

    def __init__(
        self, of: Policy | None = None, window: int = 200, reserve: float = 0.05, seed: int = 0
    ) -> None:
        super().__init__(of)
        self.window = require_whole("window", window, 1)
        self.reserve = require_number("reserve", reserve, 0, below=1)
        self._random = Random(require_whole("seed", seed))
        self._outputs: deque[int] = deque(maxlen=self.window)
        self._lengths: dict[Request, float] = {}  # what answers are taken to come to

    def refuses(self, request: Request, state: ServerState) -> float | None:
        there = [*state.running, *state.swapped]
        left = {one: self._left(one, state) for one in (*there, request)}
        room = (state.total_blocks - 1) * state.block_size * (1 - self.reserve)
        excess = self._peak(left, state.block_size) - room
        if excess <= 0:
            return None
        return self._steps(excess / request.width, there, left)

    def _steps(self, excess: float, there: list[Request], left: dict[Request, float]) -> int:
        """Steps for which that holds, if nobody comes or leaves.

        While the batch decodes, a newcomer would have a token less at its peak with each step;
        until somebody says more than was thought.
        """
        if not all(one.decoding for one in there):
            return 1
        return int(min(ceil(excess), *left.values()))

    def _peak(self, left: dict[Request, float], block_size: int) -> float:
        """Tokens in memory at most, the last blocks of all counted whole."""
        peak = held = sequences = 0.0
        for one in sorted(left, key=left.__getitem__, reverse=True):
            # Whoever is to decode first gets a token from the prompt.
            held += one.width * (one.num_tokens + (not one.decoding) + block_size - 1)
            sequences += one.width
            peak = max(peak, held + sequences * left[one])
        return peak

    def _left(self, request: Request, state: ServerState) -> float:
        """Tokens that a request will still generate and keep: the last one is not kept."""
        said = request.generated
        length = self._lengths.get(request, 0.0)
        if length <= said:
            length = self._lengths[request] = self._length(request, state)
        return max(length - said - 1, 0)

    def _length(self, request: Request, state: ServerState) -> float:
        """What its answer will come to: more than it has said already, if it may."""
        said, length = request.generated, request.predicted_len
        if length is None or length <= said:
            longer = [one for one in self._outputs if one > said]
            length = self._random.choice(longer) if longer else inf
        return min(length, state.longest_output(request))

    def observe(self, event: Event) -> None:
        super().observe(event)
        if isinstance(event, Left):
            self._lengths.pop(event.request, None)
            if event.request.state is State.FINISHED:
                self._outputs.append(event.request.generated)
