"""Steps that nobody planned, to ask a cost model for."""

from __future__ import annotations

from pagedsim.core import Request, SamplingParams, StepPlan
from pagedsim.core.plan import Chunk

_SOMEBODY = Request(0, 1, SamplingParams(max_tokens=1))


def step(
    prompt: int = 0, decodes: int = 0, context: int = 0, ahead: bool = False, cached: int = 0
) -> StepPlan:
    """A prompt of so many tokens after `cached` ones, beside decodes with so much context."""
    plan = StepPlan(number=0, now=0.0, ahead=ahead)
    if prompt:
        plan.add_chunk(Chunk(_SOMEBODY, cached, prompt, samples=True))
    plan.decode_count, plan.decode_context = decodes, context
    return plan
