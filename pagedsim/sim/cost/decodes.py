"""A cost model around another one: decodes alone."""

from __future__ import annotations

from pagedsim.core import StepPlan
from pagedsim.sim.cost.base import Breakdown, CostModel
from pagedsim.sim.cost.work import Work


class Decodes(CostModel):
    """Steps take the time of their decodes alone."""

    def __init__(self, whole: CostModel) -> None:
        self._whole = whole
        self.by_totals = whole.by_totals
        self.bus_efficiency = whole.bus_efficiency

    @property
    def notices(self) -> list[str]:
        return ["prompts take no time, as if they came computed", *self._whole.notices]

    def step_seconds(self, plan: StepPlan) -> float:
        return self._whole.step_seconds(_without_chunks(plan)) if plan.decode_count else 0.0

    def decode_seconds(self, sequences: int, context: int) -> float:
        return self._whole.decode_seconds(sequences, context)

    def swap_seconds(self, blocks: int) -> float:
        return self._whole.swap_seconds(blocks)

    def recompute_seconds(self, tokens: int) -> float:
        return 0.0

    def explain(self, plan: StepPlan) -> Breakdown:
        return self._whole.explain(_without_chunks(plan))

    def work(self, plan: StepPlan) -> Work:
        return self._whole.work(_without_chunks(plan))


def _without_chunks(plan: StepPlan) -> StepPlan:
    part = StepPlan(plan.number, plan.now, plan.ahead)
    part._decodes = plan.decodes
    part._decode_count, part._decode_context = plan.decode_count, plan.decode_context
    return part
