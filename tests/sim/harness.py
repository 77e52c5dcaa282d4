"""Small runs with costs that one can compute by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.simulate import simulate


@dataclass
class Constant:
    """Every step takes the same time; every block on the bus, too."""

    step: float = 1.0
    block: float = 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        return self.step

    def decode_seconds(self, sequences: int, context: int) -> float:
        return self.step

    def swap_seconds(self, blocks: int) -> float:
        return self.block * blocks


@dataclass
class Affine(Constant):
    """Steps take longer with what is in them, by numbers that no float holds exactly."""

    def step_seconds(self, plan: StepPlan) -> float:
        own = 1e-4 * plan.prefill_tokens + 3e-8 * plan.prefill_attention
        return own + self.decode_seconds(plan.decode_count, plan.decode_context)

    def decode_seconds(self, sequences: int, context: int) -> float:
        return 0.0123 + 1.7e-4 * sequences + 1.1e-7 * context


@dataclass
class Jobs:
    """A workload written down: (arrival, prompt, output) a row, due so long after its arrival."""

    rows: Sequence[tuple[float, int, int]]
    mode: Literal["open", "closed", "burst"] = "open"
    users: int | None = None
    think_time: float = 0.0
    turns: None = None
    priorities: Sequence[int] = field(default_factory=lambda: (0,))
    due: float | None = None

    def requests(self) -> Iterator[tuple[Request, int]]:
        for number, (arrival, prompt, output) in enumerate(self.rows):
            request = Request(
                number,
                prompt,
                arrival=arrival,
                priority=self.priorities[number % len(self.priorities)],
                predicted_len=output,
                deadline=None if self.due is None else arrival + self.due,
            )
            yield request, output


def run(
    scheduler: Scheduler,
    jobs: Jobs,
    cost: Constant | None = None,
    *,
    overlap: bool = False,
    fast_forward: bool = True,
    way: float = 0.0,
) -> tuple[pa.Table, pa.Table]:
    """The tables of requests and steps."""
    recorder = Recorder()
    simulate(
        scheduler,
        jobs,
        cost or Constant(),
        recorder,
        overlap=overlap,
        fast_forward=fast_forward,
        way=way,
    )
    return recorder.requests_table(), recorder.steps_table()


def content(table: pa.Table) -> list[object]:
    """All of it, in a form in which a NaN equals itself."""
    return [
        column.to_numpy().tobytes() if pa.types.is_primitive(column.type) else column.to_pylist()
        for column in table.columns
    ]
