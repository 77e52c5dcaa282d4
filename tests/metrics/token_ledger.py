"""A recorder that also writes down when each token came, and which keys and values were computed
before, step by step and token by token."""

from __future__ import annotations

from collections import Counter

import numpy as np

from pagedsim.core import Request, RequestId, Scheduler, State, StepPlan
from pagedsim.metrics.recorder import Recorder, ReplicaRecorder
from pagedsim.metrics.steps import REPLICA
from pagedsim.metrics.tables import Requests, stretches_of


class TokenLedger(Recorder):
    """For runs without fast-forward. A request that lost its tokens with its replica begins anew,
    as another object."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[Request, list[float]] = {}
        self.of: dict[RequestId, list[float]] = {}
        """The times of the tokens of each request that has left."""
        self._computed: dict[RequestId, set[int]] = {}  # positions whose KV has been computed
        self.recomputed: Counter[RequestId] = Counter()
        """Of these, what was computed again, over all sequences."""

    def add_replica(self) -> ReplicaRecorder:
        self.replicas.append(_ReplicaLedger(self, len(self.replicas)))
        return self.replicas[-1]

    def write(self, plan: StepPlan, end: float) -> list[tuple[RequestId, set[int], int]]:
        """The tokens of a step; returns what was computed, of each request: positions for the first
        time, and the number of others."""
        positions: dict[Request, list[int]] = {}
        for chunk in plan.chunks:
            positions.setdefault(chunk.request, []).extend(range(chunk.start, chunk.context))
        for request in plan.decodes:
            # A step in flight computes what is retracted, and what is detached goes on elsewhere.
            if request.alive and (request not in plan.gone or request.state is State.WAITING):
                length = request.prompt_len + len(self.times[request])
                positions[request] = [length - 1] * request.width
        written = []
        for request, own in positions.items():
            before = self._computed.setdefault(request.id, set())
            again = sum(position in before for position in own)
            written.append((request.id, set(own) - before, again))
            before.update(own)
            self.recomputed[request.id] += again
        sampled = [chunk.request for chunk in plan.chunks if chunk.samples]
        for request in (*plan.decodes, *sampled):
            if request not in plan.gone:
                self.times.setdefault(request, []).append(end)
        return written

    def strike(self, written: list[tuple[RequestId, set[int], int]]) -> None:
        """A step did not complete."""
        for name, positions, again in written:
            self._computed[name] -= positions
            self.recomputed[name] -= again

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        super().step(plan, start, end, scheduler)
        self.write(plan, end)

    def left(self, request: Request) -> None:
        super().left(request)
        self.of[request.id] = self.times.pop(request, [])

    def compare(self) -> int:
        """Fail unless the metrics know the time of each token of each request that finished, and
        what was computed again; returns the number of their stretches."""
        requests, steps = Requests.of(self.requests_table()), self.steps_table()
        end, decodes = (np.asarray(steps[name]) for name in ("end", "decode_seqs"))
        where = np.asarray(steps[REPLICA]) if len(self.replicas) > 1 else np.zeros(len(end))
        number = max(1, len(self.replicas))
        ends = [end[(decodes > 0) & (where == index)] for index in range(number)]
        finished, stretches = requests.in_state("finished"), stretches_of(requests, ends)
        names = np.asarray(self.requests_table()["request"])
        assert not stretches.spread[finished].any()
        for row in np.flatnonzero(finished).tolist():
            came = self.of[names[row].item()]
            assert requests["output_tokens"][row] == len(came)
            got = stretches.at(np.full(len(came), row), np.arange(len(came)))
            assert got.tolist() == came
            assert requests["recomputed_tokens"][row] == self.recomputed[names[row].item()]
        return len(stretches.request)


class _ReplicaLedger(ReplicaRecorder):
    def __init__(self, whole: TokenLedger, index: int) -> None:
        super().__init__(whole, index)
        self._ledger = whole

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        super().step(plan, start, end, scheduler)
        self._written = self._ledger.write(plan, end)

    def undo(self) -> None:
        super().undo()
        self._ledger.strike(self._written)
