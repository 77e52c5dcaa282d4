"""What a budget does to the gaps between tokens: an ablation, and the bound that it sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.papers.chunk_part import Part, mean, over_seeds, told
from pagedsim.core import Request, SamplingParams, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.metrics.arms import Run
from pagedsim.metrics.gap import token_gaps
from pagedsim.metrics.result import Listing, Row
from pagedsim.run.job import Arm
from pagedsim.run.objects import each_of, require_kinds
from pagedsim.run.parts import backend_of
from pagedsim.run.runs import Runs
from pagedsim.run.simulated import Simulated
from pagedsim.run.study import Reading

_SOMEBODY = Request(0, 1, SamplingParams(max_tokens=1))
METRICS = {"ttft": "ttft_p50", "gap": "itl_p99"}
"""What was published of an arm, and where a summary has it."""
NAMES = {"ttft": "P50 TTFT", "gap": "P99 gap"}


@dataclass(frozen=True, kw_only=True)
class Published:
    """An arm of the paper's ablation, in seconds."""

    budget: str | None
    """What it is here; None: nothing here composes steps so."""
    ttft: float
    gap: float


@dataclass(frozen=True, kw_only=True)
class Stall:
    """The longest gap of some runs, and what a step that fills the budget costs at most."""

    gap: float
    cost: float


@dataclass(frozen=True, kw_only=True)
class Stalls(Part):
    """One rate of arrivals under every budget."""

    name: str
    overrides: Sequence[str]
    published: Mapping[str, Mapping[str, Any]]
    """Settings of `Published`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, one in self._published.items():
            require_kinds(one, f"study.stalls.published.{name}")
            if one.budget is not None:
                self.require_budget(f"study.stalls.published.{name}", one.budget)

    @property
    def _published(self) -> dict[str, Published]:
        return each_of(Published, self.published, "study.stalls.published")

    def ask(self, runs: Runs) -> list[Arm]:
        return [
            Arm(self._arm(budget), [*self.overrides, *changes])
            for budget, changes in self.budgets.items()
        ]

    def _arm(self, budget: str) -> str:
        return f"{self.name}, {budget}"

    def read(self, runs: Runs) -> Reading:
        by_budget = {budget: runs.of(self._arm(budget)) for budget in self.budgets}
        stalls = {budget: stall_of(these) for budget, these in by_budget.items()}
        return Reading(
            finding=self._finding(by_budget, stalls),
            rows=self._rows(by_budget),
            listings=[self._listing(by_budget, stalls)],
            data={
                "stalls": {
                    budget: {"longest_gap": stall.gap, "full_budget": stall.cost}
                    for budget, stall in stalls.items()
                }
            },
        )

    def _rows(self, by_budget: Mapping[str, Sequence[Run]]) -> list[Row]:
        rows = []
        for name, one in self._published.items():
            for what, key in METRICS.items():
                label, printed = f"{self.name}, {name}: {NAMES[what]}", getattr(one, what)
                if one.budget is None:
                    why = "nothing here computes chunks in steps of their own"
                    rows.append(Row(label, math.nan, printed, "s", why))
                    continue
                values = over_seeds(by_budget[one.budget], key)
                why = f"seeds give {min(values):.3g} to {max(values):.3g} s"
                rows.append(Row(label, mean(values), printed, "s", why))
        return rows

    def _listing(
        self, by_budget: Mapping[str, Sequence[Run]], stalls: Mapping[str, Stall]
    ) -> Listing:
        rows = []
        for budget, runs in by_budget.items():
            stall = stalls[budget]
            bound = ["–", "–"]
            if not math.isnan(stall.cost):
                bound = [f"{stall.cost:.3g} s", f"{stall.gap / stall.cost:.2f}"]
            keys = ("ttft_p50", "ttft_p99", "itl_p99")
            cells = [told(over_seeds(runs, key)) for key in keys]
            rows.append([budget, *cells, f"{stall.gap:.3g} s", *bound])
        head = ["", "P50 TTFT", "P99 TTFT", "P99 gap", "longest gap", "full budget costs", "share"]
        return Listing(
            f"{self.name}: gaps between tokens, by the steps' budget",
            head,
            rows,
            "Means, and between what seeds lie. A full budget costs what a step takes that "
            "computes so many tokens at the end of the longest request, beside the largest batch "
            "there was.",
        )

    def _finding(
        self, by_budget: Mapping[str, Sequence[Run]], stalls: Mapping[str, Stall]
    ) -> list[str]:
        parts = []
        for name, one in self._published.items():
            if one.budget is not None:
                these = by_budget[one.budget]
                ttft, gap = (mean(over_seeds(these, key)) for key in METRICS.values())
                parts.append(
                    f"{ttft:.2f} and {gap:.2f} s with {name} (published: {one.ttft:g} and "
                    f"{one.gap:g})"
                )
        sentences = [f"{self.name}, P50 TTFT and P99 gap: {', '.join(parts)}."] if parts else []
        bounded = {b: s.gap / s.cost for b, s in stalls.items() if not math.isnan(s.cost)}
        if bounded:
            most = max(bounded, key=lambda budget: bounded[budget])
            sentences.append(
                f"Where chunks run beside decodes, no gap was longer than {bounded[most]:.2f} of "
                f"what a step costs that fills the budget ({most})."
            )
        return sentences


def stall_of(runs: Sequence[Run]) -> Stall:
    """Over all seeds; NaN for the cost where a step has no budget that prompts are cut to."""
    gaps = [longest_gap(run) for run in runs]
    unified = runs[0].config["batching"]["_target_"].endswith("Unified")
    cost = max(full_budget(run) for run in runs) if unified else math.nan
    return Stall(gap=max(gaps), cost=cost)


def longest_gap(run: Run) -> float:
    """Between two tokens of a request that was never preempted."""
    steps = run.steps("end", "decode_seqs")
    end, decodes = (np.asarray(steps[name].to_numpy()) for name in steps.column_names)
    table = run.requests("first_token", "finished", "output_tokens", "preemptions")
    first, last, tokens, preempted = (
        np.asarray(table[name].to_numpy()) for name in table.column_names
    )
    there = (tokens > 1) & (preempted == 0) & ~np.isnan(last)
    gaps, _ = token_gaps(
        end[decodes > 0], first[there], last[there], tokens[there], preempted[there]
    )
    return float(gaps.max(initial=0.0))


def full_budget(run: Run) -> float:
    """Seconds of a step that computes all of its budget at the end of the longest request."""
    backend = backend_of(run.config)
    assert isinstance(backend, Simulated)
    stage = backend.simulation(run.config, run.seed)
    table = run.requests("prompt_tokens", "output_tokens")
    prompt, output = (np.asarray(table[name].to_numpy()) for name in table.column_names)
    longest = int((prompt + output).max())
    steps = run.steps("decode_seqs", "decode_context")
    plan = StepPlan(number=0, now=0.0)
    left = stage.scheduler.max_batched_tokens
    while left > 0:
        length = min(left, longest)
        plan.add_chunk(Chunk(_SOMEBODY, longest - length, length, samples=True))
        left -= length
    plan.decode_count, plan.decode_context = (
        int(np.asarray(steps[name].to_numpy()).max()) for name in steps.column_names
    )
    return stage.cost.step_seconds(plan)
