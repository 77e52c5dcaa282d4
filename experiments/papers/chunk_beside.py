"""Short requests beside long prompts: what a bound on the chunk of one prompt does for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from experiments.papers.chunk_part import Part, mean, told
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing
from pagedsim.run.job import Arm, Job
from pagedsim.run.parts import backend_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Reading

Found = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""Of each bound and client, the columns' values, a seed each."""
COLUMNS = ("ttft_p50", "ttft_p99", "itl_p99", "e2e_mean")
HEADS = ("P50 TTFT", "P99 TTFT", "P99 gap", "mean E2E")


@dataclass(frozen=True, kw_only=True)
class Beside(Part):
    """Two classes of clients under every bound; the first of `budgets` has none."""

    overrides: Sequence[str]
    short: str
    """The client whose requests are short."""
    long: str

    def ask(self, runs: Runs) -> list[Arm]:
        return [
            Arm(_arm(bound), [*self.overrides, *changes]) for bound, changes in self.budgets.items()
        ]

    def check(self, jobs: Sequence[Job]) -> None:
        arms = [_arm(bound) for bound in self.budgets]
        for job in jobs:
            if job.arm not in arms:
                continue
            there = backend_of(job.config).workload(job.config, job.seed).clients
            for client in (self.short, self.long):
                if client not in there:
                    names = ", ".join(filter(None, there)) or "none with a name"
                    raise ConfigError(
                        f"study.beside: {client}: no such client in the workload; it has {names}"
                    )

    def read(self, runs: Runs) -> Reading:
        found = {
            bound: {
                client: [_of(runs.of(_arm(bound)), client, key) for key in COLUMNS]
                for client in (self.short, self.long)
            }
            for bound in self.budgets
        }
        return Reading(
            finding=list(self._finding(found)),
            listings=[self._listing(found)],
            data={
                "beside long prompts": {
                    bound: {
                        client: dict(zip(COLUMNS, map(mean, values), strict=True))
                        for client, values in each.items()
                    }
                    for bound, each in found.items()
                }
            },
        )

    def _finding(self, found: Found) -> Iterator[str]:
        first, *others = found
        if not others:
            return
        best = min(others, key=lambda bound: mean(found[bound][self.short][1]))
        tail, its_tail = (mean(found[bound][self.short][1]) for bound in (first, best))
        long, its_long = (mean(found[bound][self.long][0]) for bound in (first, best))
        yield (
            f"Beside long prompts, {best} instead of {first} take the P99 TTFT of {self.short} "
            f"from {tail:.3g} to {its_tail:.3g} s, and the P50 TTFT of {self.long} from "
            f"{long:.3g} to {its_long:.3g} s."
        )

    def _listing(self, found: Found) -> Listing:
        rows = [
            [f"{bound}: {client}", *map(told, values)]
            for bound, each in found.items()
            for client, values in each.items()
        ]
        return Listing(
            "Short requests beside long prompts",
            ["", *HEADS],
            rows,
            "Means, and between what seeds lie.",
        )


def _arm(bound: str) -> str:
    return f"beside long prompts, {bound}"


def _of(runs: Sequence[Run], client: str, key: str) -> list[float]:
    return [run.summary["clients"][client][key] for run in runs]
