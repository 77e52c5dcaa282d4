"""A server of decodes alone: prompts take no time, decodes what they take."""

from __future__ import annotations

from pagedsim.core import StepPlan
from pagedsim.sim.cost import CostModel, Decodes, Roofline
from pagedsim.sim.cost.base import step
from tests.sim.shapes import replica


def both() -> tuple[CostModel, CostModel]:
    whole = Roofline(replica("llama-2-7b", "a100-80gb"))
    return whole, Decodes(whole)


def test_prompts_take_no_time_and_decodes_their_own() -> None:
    whole, alone = both()
    decode = step(decodes=8, context=8000)
    assert alone.step_seconds(step(500)) == alone.step_seconds(StepPlan(0, 0.0)) == 0.0
    assert alone.step_seconds(decode) == whole.step_seconds(decode) > 0
    mixed = step(500, decodes=8, context=8000)
    assert alone.step_seconds(mixed) == whole.step_seconds(decode) < whole.step_seconds(mixed)
    assert mixed.prefill_tokens == 500  # asking changes nothing
    assert alone.decode_seconds(8, 8000) == whole.decode_seconds(8, 8000)
    assert alone.explain(mixed) == whole.explain(decode)
    assert alone.work(mixed) == whole.work(decode)


def test_recomputation_is_free_and_swapping_is_not() -> None:
    whole, alone = both()
    assert alone.recompute_seconds(500) == 0.0 < whole.recompute_seconds(500)
    assert alone.swap_seconds(9) == whole.swap_seconds(9) > 0
    assert alone.server_seconds == 0.0
    assert alone.by_totals is whole.by_totals
    assert alone.notices == ["prompts take no time, as if they came computed", *whole.notices]
