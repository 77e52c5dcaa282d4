"""The check of cost models, and the defaults of `CostModel`."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from pagedsim.core import ConfigError, StepPlan
from pagedsim.sim.cost import Breakdown, CostModel, Roofline, Term
from pagedsim.sim.cost.base import step
from pagedsim.sim.cost.work import Work
from pagedsim.sim.replica import Replica
from pagedsim.spec.run import RunSpec
from pagedsim.testing import check_cost_model
from pagedsim.testing.cost import A100, LLAMA_2_7B
from tests.run.studies import CONF, command

REPLICA = Replica(LLAMA_2_7B, A100)


class Linear(CostModel):
    """By the tokens of a step."""

    def step_seconds(self, plan: StepPlan) -> float:
        tokens = plan.prefill_tokens + plan.decode_count
        return 0.01 + 1e-5 * tokens + 1e-8 * plan.decode_context


class Free(Linear):
    def step_seconds(self, plan: StepPlan) -> float:
        return 0.0


class Noisy(Linear):
    def step_seconds(self, plan: StepPlan) -> float:
        return random.random()


class Warming(Linear):
    def step_seconds(self, plan: StepPlan) -> float:
        return 0.01 if plan.number > 100 else 0.02


class Warmed(Warming):
    by_totals = False


class Rounded(Linear):
    def decode_seconds(self, sequences: int, context: int) -> float:
        return round(super().decode_seconds(sequences, context), 4)


class Halved(Linear):
    def explain(self, plan: StepPlan) -> Breakdown:
        term = Term("half", self.step_seconds(plan) / 2, "fitted")
        return Breakdown("decode", (term,), Work(0.0, 0.0))


class Cheap(Linear):
    def swap_seconds(self, blocks: int) -> float:
        return -1.0


class Spent(Linear):
    """Has a bus that is faster with more."""

    def swap_seconds(self, blocks: int) -> float:
        return 1.0 / blocks


class Forgetful(Linear):
    def recompute_seconds(self, tokens: int) -> float:
        return random.random()


class Priced:
    """Prices of its own, in milliseconds of a clock that runs backwards."""

    def swap_seconds(self, blocks: int) -> float:
        return -blocks

    def recompute_seconds(self, tokens: int) -> float:
        return 0.0


class Own(Linear):
    def prices(self) -> Any:
        return Priced()


class Local(Linear):
    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.scale = Lock()


class Alone(Linear):
    """Leaves the replica to the run."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


@pytest.mark.parametrize("make", [Linear, Warmed, Roofline, Alone, lambda replica: Alone(2.0)])
def test_success_is_silent(make: Any) -> None:
    check_cost_model(make, cases=10)


WHOLE = [name for name in CONF.options_of("cost") if name not in ("fitted", "measured", "replay")]
"""The options that need no file."""


@pytest.mark.parametrize("name", WHOLE)
def test_the_cost_models_of_pagedsim_keep_their_promises(name: str) -> None:
    config = command(Path(), "experiment=single", f"cost={name}").config
    check_cost_model(RunSpec(config).cost, cases=3)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            Free,
            r"Free\.step_seconds gave 0\.0: must be above 0, in a step of \d+ prompt tokens and",
        ),
        (Noisy, r"Noisy\.step_seconds gave 0\.\d+ and then 0\.\d+ for the same plan"),
        (Warming, r"Warming\.by_totals=True: step_seconds gave 0\.02, and 0\.01 for a later step"),
        (Rounded, r"Rounded\.decode_seconds gave 0\.\d+, step_seconds 0\.\d+ for the same decodes"),
        (Halved, r"Halved\.explain adds up to [\d.]+ s, step_seconds gave"),
        (Cheap, r"Cheap: Cheap\.swap_seconds gave -1\.0: must be seconds"),
        (Spent, r"Spent: Spent\.swap_seconds gave 0\.1 for 10 blocks, and 1\.0 for 1, in llama-2"),
        (
            Forgetful,
            r"Forgetful: Forgetful\.recompute_seconds gave 0\.\d+ and then 0\.\d+ for 1 tok",
        ),
        (Own, r"Own: Priced\.swap_seconds gave -1: must be seconds"),
        (Local, r"Local: cannot be copied: TypeError: .*lock"),
    ],
)
def test_the_first_broken_promise_is_named(kind: type[CostModel], told: str) -> None:
    with pytest.raises(AssertionError, match=rf"^{told}") as error:
        check_cost_model(kind)
    assert "\n" not in str(error.value)


def test_the_defaults_are_what_they_say() -> None:
    cost, roofline = Linear(REPLICA), Roofline(REPLICA)
    assert cost.decode_seconds(3, 900) == cost.step_seconds(step(decodes=3, context=900))
    assert cost.recompute_seconds(70) == cost.step_seconds(step(70))
    assert cost.swap_seconds(5) == roofline.swap_seconds(5)
    assert cost.work(step(70, 2, 90)) == roofline.work(step(70, 2, 90))
    told = cost.explain(step(70))
    assert told.seconds == cost.step_seconds(step(70)) and told.bound == "fitted"
    with pytest.raises(ConfigError, match=r"Alone\.replica: is not set"):
        Alone().swap_seconds(1)
