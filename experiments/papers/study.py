"""The study of published figures: it runs their arms and joins their analyses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.experiments.papers.drawing import drawing_of
from pagedsim.experiments.papers.figure import Figure
from pagedsim.experiments.papers.findings import Findings
from pagedsim.experiments.papers.reproduction import ByArm, Reproduction
from pagedsim.experiments.papers.sentences import sentences
from pagedsim.metrics.result import Row
from pagedsim.run.compose import group_of, key_of
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis
from pagedsim.workload.predictor import PREDICTED

_NEUTRAL = ("experiment", "seed", "seeds", "jobs", "report", "tracking")
"""Overrides that leave the experiment comparable to the published one."""


@dataclass(frozen=True, kw_only=True)
class Figures(Reproduction):
    """Figures and tables of a paper, run and analysed as they are published."""

    figures: Mapping[str, Figure | None]
    """One that is null is left out."""
    only: Sequence[str] | None = None
    """The cases to run; None: all."""
    remarks: Sequence[str] = ()
    """Notes on the reproduction."""
    one_server: bool = True  # type: ignore[misc]
    """Whether it is about a single server, so that a fleet is refused."""
    idle: Mapping[str, str] = field(default_factory=dict)  # type: ignore[misc]
    """Keys and groups without effect on the result, and the reasons."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [case for one in self.drawn.values() for case in one.cases]
        for name in self.only or ():
            if name not in known:
                raise ConfigError(f"only: {unknown('case', name, known)}")
        for name, figure in self.drawn.items():
            figure.check(f"figures.{name}")
        wanted = {name: figure.of_cases(self.only) for name, figure in self.drawn.items()}
        object.__setattr__(self, "figures", {n: one for n, one in wanted.items() if one.cases})

    @property
    def drawn(self) -> dict[str, Figure]:
        """The figures that are not left out."""
        return {name: one for name, one in self.figures.items() if one is not None}

    def arms(self) -> dict[str, list[str]]:
        return {name: own for one in self.drawn.values() for name, own in one.arms().items()}

    def key_of(self, arm: str) -> str:
        for name, figure in self.drawn.items():
            for case, *_, own in figure.points():
                if own == arm:
                    part = "variants" if case in figure.variants else "cases"
                    return f"study.figures.{name}" + (f".{part}.{case}" if case else "")
        return f"study.figures.{arm}"

    def analyse(self, runs: Runs) -> Analysis:
        """With a note on overrides by which the runs are of something else than was published."""
        typed = [
            word
            for word in runs.command.words
            if key_of(word) not in self.idle
            and not word.startswith(("~study", "study.only", "+study.only"))
            and group_of(word) not in _NEUTRAL
        ]
        own = f"what was published belongs to experiment={runs.command.experiment} without them"
        reading = super().analyse(runs)
        # The quality of predictions is a measure where it matters.
        notes = [note for note in reading.notes if PREDICTED not in note]
        return replace(reading, notes=[*([f"{', '.join(typed)}: {own}"] if typed else ()), *notes])

    def read_arms(self, runs: ByArm) -> Analysis:
        every = {name: Findings(one, one.read(runs)) for name, one in self.drawn.items()}
        finding, rows = list[str](), list[Row]()
        for findings in every.values():
            for one in findings.figure.comparisons:
                if not one.rows:
                    continue
                rows += findings.rows(one)
                if one.finding:
                    finding += sentences(findings, one)
        drawings = {name: drawing_of(findings) for name, findings in every.items()}
        return Analysis(
            finding=finding,
            rows=rows,
            listings=[findings.listing() for findings in every.values()],
            notes=list(self.remarks),
            data={name: findings.data() for name, findings in every.items()},
            drawings={name: drawing for name, drawing in drawings.items() if drawing is not None},
            brief=True,
        )


@dataclass(frozen=True, kw_only=True)
class Rejection(Figures):
    """Figures of a fleet that may refuse a request between prefill and decode."""

    def next_runs(self, runs: Runs) -> list[Arm]:
        pools = runs.config["fleet"]["pools"] or {}
        if not {"prefill", "decode"} <= {pool.get("role") for pool in pools.values()}:
            raise ConfigError(
                f"fleet={runs.command.choices.get('fleet')}: must have prefill and decode apart, "
                "as fleet=prefill_decode has: requests are refused between them"
            )
        return super().next_runs(runs)
