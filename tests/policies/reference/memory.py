"""The reference of the policy that goes by memory: Past-Future."""

from __future__ import annotations

from math import inf

from pagedsim.core import Left, Policy, Request, ServerState
from pagedsim.core.policy import Around
from pagedsim.core.request import State


class PastFuture(Around):
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
        return self.of.admit(request, state)

    def peak(self, batch: list[Request], state: ServerState) -> float:
        """Tokens in memory at most, last blocks counted whole, while nothing else is admitted."""
        left = {one: max(self.length(one, state) - one.generated - 1, 0) for one in batch}
        step, most = 0, 0.0
        while any(left[one] >= step for one in batch):
            there = [one for one in batch if left[one] >= step]
            most = max(most, sum(one.width * (self.held(one, state) + step) for one in there))
            step += 1
        return most

    def held(self, request: Request, state: ServerState) -> int:
        """Tokens of each sequence now, or after its prefill, which generates one."""
        first = 0 if request.decoding else 1
        return request.prompt_len + request.generated + first + state.block_size - 1

    def length(self, request: Request, state: ServerState) -> float:
        """Its output, predicted or drawn from longer ones of the past; kept until it is reached."""
        said = request.generated
        for one, length in reversed(self.drawn):
            if one is request:
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
        self.of.observe(event)  # type: ignore[arg-type]
        if isinstance(event, Left) and event.request.state is State.FINISHED:
            self.outputs.append(event.request.generated)
