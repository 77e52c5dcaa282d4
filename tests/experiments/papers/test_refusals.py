"""Settings of papers' studies: constraints, what is refused, and notes on overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from hydra import compose
from omegaconf import OmegaConf

from experiments.papers.reproduction import Reproduction
from experiments.papers.settings import Count, In, Names, Number, Positive, Range, check_settings
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.run.compose import Command
from pagedsim.run.job import Job
from pagedsim.run.objects import make
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from tests.run.studies import carried_out

# -- constraints -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Load:
    rates: Annotated[Mapping[str, Sequence[float]], In("systems"), Number(above=0)]
    bound: Positive | None = None
    own: Names | None = None
    of: Annotated[str | None, In("loads")] = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    systems: Annotated[Names, Count(2)]
    base: Annotated[str, In("systems")] = "a"
    others: Annotated[Sequence[str], In("systems")] = ()
    loads: Annotated[Mapping[str, Load], Count()] = field(default_factory=dict)
    points: Sequence[Load] = ()
    one: Load | None = None
    published: Annotated[Sequence[float], Range()] = (1, 2)
    seeds: Annotated[int, Number(1, whole=True)] = 1
    pair: Annotated[Sequence[float], Count(2, 2)] = (1, 2)


LOAD = {"rates": {"a": [1, 2]}}


def checked(**more: Any) -> Settings:
    settings = Settings(
        **{"systems": {"a": ["policy=fcfs"], "b": []}, "loads": {"chat": LOAD}, **more}
    )
    check_settings(settings)
    return settings


def test_nested_settings_become_objects() -> None:
    settings = checked(points=[LOAD], one=LOAD | {"bound": 3.0})
    assert settings.loads["chat"] == settings.points[0] == Load(rates={"a": [1, 2]})
    assert settings.one == Load(rates={"a": [1, 2]}, bound=3.0)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"systems": {"a": []}}, "systems: 1 of them: must be at least 2"),
        ({"systems": 5}, "systems=5: must be a mapping of names to settings"),
        ({"base": "c"}, "base=c: unknown; choose from a, b"),
        ({"others": ["a", "c"]}, "others=c: unknown; choose from a, b"),
        ({"loads": {}}, "loads: 0 of them: must be at least 1"),
        ({"loads": {"x": {"rates": {"c": [1]}}}}, "loads.x.rates.c: unknown; choose from a, b"),
        ({"loads": {"x": {"rates": {"a": [0]}}}}, "loads.x.rates.a=0: must be a number above 0"),
        ({"loads": {"x": LOAD | {"bound": "y"}}}, "loads.x.bound='y': must be a number"),
        ({"loads": {"x": LOAD | {"of": "y"}}}, "loads.x.of=y: unknown; choose from x"),
        (
            {"loads": {"x": LOAD | {"rate": 1}}},
            "loads.x.rate: no such setting of x; did you mean 'rates'? choose from bound, of, own,"
            " rates",
        ),
        ({"loads": {"x": {}}}, "loads.x.rates: must be given, for x"),
        ({"points": [{"rates": {"c": [1]}}]}, "points.rates.c: unknown; choose from a, b"),
        ({"published": [2]}, "published=[2]: must be [from, to]"),
        ({"seeds": 0}, "seeds=0: must be a whole number of at least 1"),
        ({"pair": [1, 2, 3]}, "pair: 3 of them: must be 2"),
    ],
)
def test_an_error_names_the_place_and_the_values_allowed(more: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        checked(**more)
    assert str(raised.value) == error


# -- what a study refuses --------------------------------------------------------------------------


def parts(*, budgets: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The changes by which a chunk-budget study has these parts alone."""
    none = dict.fromkeys(("capacity", "stalls", "crossing", "beside"))
    return none | more | ({} if budgets is None else {"budgets": budgets})


POINTS: dict[str, Any] = {"overrides": [], "rates": [1, 3], "arrivals": {"Poisson": []}}
TWO: dict[str, Any] = {"first": [], "512": []}
CURVES: dict[str, Any] = {"payers": None, "only": None, "bursts": {}}


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize(
    ("experiment", "changes", "text"),
    [
        ("chunk_budget", parts(), "study: one of capacity, stalls, crossing, beside must be given"),
        (
            "chunk_budget",
            parts(crossing={**POINTS, "budgets": {"512": []}, "published": []}),
            "crossing.budgets: 1 of them: must be",
        ),
        (
            "chunk_budget",
            parts(
                crossing={**POINTS, "published": [{"rate": 1, "seconds": {"512": 1}}]}, budgets=TWO
            ),
            "crossing.published at 1: lacks first",
        ),
        (
            "chunk_budget",
            parts(
                stalls={"name": "x", "overrides": [], "published": {}}, budgets={"a": ["seeds=2"]}
            ),
            "seeds=2: is the study's own",
        ),
        ("paper_fig2", {"published": {}}, "published.Orca .Max.=None: must be 4 numbers"),
        ("paper_fig13", {"systems": {"new": [], "paged": []}}, "published: lacks new"),
        ("paper_fig18", {"sizes": [16]}, "must be 2 or more"),
        ("paper_fig18", {"sizes": [1, 2]}, "must hold"),
        ("paper_fig18", {"kernel": "conf"}, "study.kernel=conf: .* has no kernel times"),
        ("migration", {"at": 0.5}, "at=0.5: must be one of study.rates: "),
        ("prefix_routing", {"stages": [{"rate": 1, "seconds": 1}] * 3},
         "stages: must be a warm-up and at least one other, each once"),
        ("early_rejection", {"of": 1}, r"published\..*: must be a whole number"),
        ("size_based", {"only": ["talk"]}, "only: unknown curve or burst 'talk'"),
        (
            "size_based",
            {"curves": {"chat": {"rates": {"fcfs": []}}}, **CURVES},
            r"curves.chat.rates.fcfs=\[\]: must name at least one rate",
        ),
        (
            "size_based",
            {"curves": {"chat": {"rates": {"srpt": [1]}}}, **CURVES},
            "curves.chat.rates: lack fcfs, the base",
        ),
        ("size_based", {"curves": {}, **CURVES}, "at least one must be asked for"),
    ],
)  # fmt: skip
def test_a_study_refuses_what_cannot_be(
    experiment: str, changes: Mapping[str, Any], text: str
) -> None:
    composed = compose("config", overrides=[f"experiment={experiment}"]).study
    settings: Any = OmegaConf.to_container(composed, resolve=True)
    with pytest.raises(ConfigError, match=text):
        make("study", settings | dict(changes), Study)


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "experiment=chunk_budget study.capacity=null study.crossing=null study.beside=null "
            "workload.arrivals=burst",
            "^workload.arrivals=burst: has no rate, which every part",
        ),
        (
            "experiment=chunk_budget study.capacity=null study.crossing=null "
            "study.beside.long=robot",
            "robot: no such client in the workload; it has batch",
        ),
        (
            "experiment=early_rejection fleet=alike",
            "^fleet=alike: must have prefill and decode apart",
        ),
        (
            "experiment=past_future workload=trace workload.path=trace.csv",
            "^workload=trace: must be one that draws lengths, such",
        ),
    ],
)
def test_what_its_runs_lack_is_told_before_they_run(words: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        carried_out(tmp_path, *words.split())


# -- notes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limited(Reproduction):
    title: str = "t"
    question: str = "q"
    source: str = "s"
    idle: ClassVar[Mapping[str, str]] = {"workload.rate": "it is closed"}

    def arms(self) -> Mapping[str, Sequence[str]]:
        return {"a": ["policy=fcfs"], "b": ["policy=fcfs"]}

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Analysis:
        return Analysis(finding=["Nothing."], rows=[], notes=[f"arms {', '.join(runs)}"])

    def published_for(self, runs: Runs) -> str:
        return "published for another model"


def with_runs(*words: str) -> Runs:
    notices = {"a": ["it is hot", "it rains"], "b": ["it is hot"]}
    runs = [
        Run(arm, 0, Path(), {}, {"notices": [{"what": what} for what in own]})
        for arm, own in notices.items()
    ]
    finished = {(run.arm, run.seed): run for run in runs}
    jobs = [Job(run.arm, run.seed, {}, Path()) for run in runs]
    return Runs(Command(list(words), {}, Path()), jobs, finished)


def test_overrides_that_change_the_comparison_are_named_first() -> None:
    alike = ("experiment=x", "seeds=2", "tracking=none", "workload.rate=2", "~study.loads")
    notes = ["arms a, b", "it is hot", "in 1 of 2 runs it rains"]
    assert Limited().analyse(with_runs(*alike)).notes == notes
    note = Limited().analyse(with_runs(*alike, "model=tiny", "study.sizes=[1]")).notes[0]
    assert note == "model=tiny, study.sizes=[1]: published for another model"
