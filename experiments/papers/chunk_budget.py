"""What the token budget of a step does: stalls, capacity, and where two chunk sizes cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from experiments.papers.chunk_beside import Beside
from experiments.papers.chunk_capacity import Capacity
from experiments.papers.chunk_crossing import Crossing
from experiments.papers.chunk_part import Budgets, Part, joined
from experiments.papers.chunk_stalls import Stalls
from experiments.studies.capacity import WITHOUT_RATE
from experiments.studies.compare import check_overrides
from pagedsim.core import ConfigError
from pagedsim.run.job import Arm, Job
from pagedsim.run.objects import require_kinds
from pagedsim.run.runs import Runs
from pagedsim.run.study import BackendName, Reading, Study

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChunkBudget(Study):
    """Four parts, each with settings of its own; one that is null is left out.

    `budgets` are the ways to compose a step that parts compare unless they bring their own.
    """

    backends: ClassVar[Sequence[BackendName]] = ("sim",)
    one_server = True
    why = "what was published is simulated here"

    title: str
    question: str
    source: str
    budgets: Budgets
    capacity: Settings | None
    stalls: Settings | None
    crossing: Settings | None
    beside: Settings | None

    def __post_init__(self) -> None:
        require_kinds(self)
        if not self.parts:
            raise ConfigError("study: one of capacity, stalls, crossing, beside must be given")
        for part in self.parts:
            check_overrides(part.budgets)

    @property
    def parts(self) -> list[Part]:
        """Those that are there, the most telling first."""
        kinds: dict[str, type[Part]] = {
            "capacity": Capacity,
            "stalls": Stalls,
            "crossing": Crossing,
            "beside": Beside,
        }
        given = {name: getattr(self, name) for name in kinds}
        return [
            kinds[name].of(name, settings, self.budgets)
            for name, settings in given.items()
            if settings is not None
        ]

    def ask(self, runs: Runs) -> list[Arm]:
        return [arm for part in self.parts for arm in part.ask(runs)]

    def check(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if (arrivals := job.config["workload"].get("arrivals")) in WITHOUT_RATE:
                raise ConfigError(
                    f"workload.arrivals={arrivals}: has no rate, which every part sets: must be "
                    "one of poisson, gamma, fixed"
                )
        for part in self.parts:
            part.check(jobs)

    def read(self, runs: Runs) -> Reading:
        reading = joined([part.read(runs) for part in self.parts])
        return replace(reading, notes=[*reading.notes, *runs.notices()])
