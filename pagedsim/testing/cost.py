"""The check of cost models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from math import isclose
from random import Random

from pagedsim.core import Request, SamplingParams, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.core.policy_validation import lines, seconds
from pagedsim.sim.cost import CostModel
from pagedsim.sim.cost.base import refuse_attributes
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.testing.cases import (
    BrokenPromise,
    accepted,
    difference,
    maker_of,
    name_of,
    outcome,
    reported,
)

_PLANS = 20
"""Plans of each case."""
_COUNTS = (1, 10, 100, 1000)
"""Blocks of swaps, and tokens that are computed again."""
_REQUEST = Request(0, 1, SamplingParams(max_tokens=1))
LLAMA_2_7B = ModelShape(
    "llama-2-7b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    intermediate=11008,
    vocab=32000,
    max_model_len=4096,
)
A100 = Hardware("a100-40gb", 39.5, bandwidth_gb_s=1555, fp16_tflops=312, pcie_gb_s=32)


def check_cost_model(
    make: Callable[[Replica], CostModel],
    *,
    replica: Replica | None = None,
    cases: int = 100,
    seed: int = 0,
) -> None:
    """Raise AssertionError where a cost model breaks a promise.

    - A step that is not empty takes finite seconds above 0, the same however often it is asked,
      and the same for equal totals if `by_totals` is set.
    - `decode_seconds` equals `step_seconds` of the same decodes, bit for bit.
    - Swaps and recomputing take finite seconds of at least 0, the same however often they are
      asked, and ten times as many blocks or tokens take no less; so do the `prices` of preemption.
    - `explain` adds up to the step.
    - Random servers give the same with every step planned and with uneventful ones fast-forwarded.
    - The object can be copied.

    `make(replica)` returns a new model; a class will do, also one that takes no `replica`, which
    is set as in a run. `replica` defaults to Llama-2-7B on an A100. `cases` is the number of
    servers, drawn by `seed`. Longer steps need not take longer.
    """
    where = replica or Replica(LLAMA_2_7B, A100)
    new = _of_replica(make, where)
    cost = new()
    name = name_of(cost)
    with reported(name, where.model.name):
        refuse_attributes(cost)
        lines(cost, "notices", cost.notices)
    for case in accepted(cases, seed, lambda case: case.scheduler()):
        draw = Random(f"plans {seed}/{case.number}")
        for number in range(_PLANS):
            plan = _drawn(draw, number)
            with reported(name, f"a step of {_shown(plan)}"):
                _check_plan(cost, plan)
        with reported(name, case):
            planned = outcome(case, case.scheduler(), cost=new())
            skipped = outcome(case, case.scheduler(), cost=new(), fast_forward=True)
            if change := difference(planned, skipped):
                raise BrokenPromise(f": {change}, every step planned and fast-forwarded")
    with reported(name, where.model.name):
        _check_prices(cost)


def _of_replica(make: Callable[..., CostModel], replica: Replica) -> Callable[[], CostModel]:
    """What makes a model as a run does: a class may leave the replica to it."""
    takes = True
    with suppress(ValueError):  # a compiled class has no signature
        takes = not isinstance(make, type) or "replica" in signature(make).parameters
    build = maker_of("check_cost_model", make, CostModel, *([replica] if takes else []))

    def new() -> CostModel:
        cost = build()
        if getattr(cost, "replica", None) is None:
            cost.replica = replica
        return cost

    return new


def _check_prices(cost: CostModel) -> None:
    for part in (cost, cost.prices()):
        for hook, unit in (("swap_seconds", "blocks"), ("recompute_seconds", "tokens")):
            ask: Callable[[int], object] = getattr(part, hook)
            before = 0.0
            for count in _COUNTS:
                took = seconds(part, hook, ask(count))
                where = f"{type(part).__name__}.{hook} gave {took!r}"
                if (again := seconds(part, hook, ask(count))) != took:
                    raise BrokenPromise(f": {where} and then {again!r} for {count} {unit}")
                if took < before:
                    raise BrokenPromise(
                        f": {where} for {count} {unit}, and {before!r} for {count // 10}"
                    )
                before = took


def _drawn(draw: Random, number: int) -> StepPlan:
    """A step of chunks, decodes or both."""
    plan = StepPlan(number, now=draw.uniform(0, 100), ahead=False)
    kind = draw.randrange(3)
    for _ in range(draw.randint(1, 3) if kind != 1 else 0):
        plan.add_chunk(Chunk(_REQUEST, draw.randint(0, 500), draw.randint(1, 2000), samples=True))
    if kind:
        plan._decode_count = draw.randint(1, 200)
        plan._decode_context = plan.decode_count * draw.randint(1, 1000)
    return plan


def _check_plan(cost: CostModel, plan: StepPlan) -> None:
    took = _positive(cost, "step_seconds", cost.step_seconds(plan))
    if (again := cost.step_seconds(plan)) != took:
        raise BrokenPromise(f".step_seconds gave {took!r} and then {again!r} for the same plan")
    if cost.by_totals:
        _check_totals(cost, plan, took)
    explained = cost.explain(plan).seconds
    if not isclose(explained, took, rel_tol=1e-6):
        raise BrokenPromise(f".explain adds up to {explained!r} s, step_seconds gave {took!r}")


def _check_totals(cost: CostModel, plan: StepPlan, took: float) -> None:
    other = StepPlan(plan.number + 1000, plan.now + 1000.0, ahead=False)
    for chunk in plan.chunks:
        other.add_chunk(chunk)
    other._decode_count, other._decode_context = plan.decode_count, plan.decode_context
    if (later := cost.step_seconds(other)) != took:
        raise BrokenPromise(
            f".by_totals=True: step_seconds gave {took!r}, and {later!r} for a later step of the "
            "same totals"
        )
    if not plan.chunks:
        alone = cost.decode_seconds(plan.decode_count, plan.decode_context)
        _positive(cost, "decode_seconds", alone)
        if alone != took:
            raise BrokenPromise(
                f".decode_seconds gave {alone!r}, step_seconds {took!r} for the same decodes"
            )


def _positive(cost: CostModel, hook: str, answer: object) -> float:
    took = seconds(cost, hook, answer)
    if not took:
        raise BrokenPromise(f".{hook} gave {answer!r}: must be above 0")
    return took


def _shown(plan: StepPlan) -> str:
    return (
        f"{plan.prefill_tokens} prompt tokens and {plan.decode_count} decodes with a context of "
        f"{plan.decode_context} tokens"
    )
