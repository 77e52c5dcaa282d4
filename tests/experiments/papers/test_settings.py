"""Settings of papers' studies: constraints, what is refused, and notes on overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.experiments.papers.reproduction import Names
from pagedsim.run.study import Study
from pagedsim.spec.check import Count, In, Number, Positive, check_settings
from pagedsim.spec.objects import make
from tests.run.studies import settings_of

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
    loads: Annotated[Mapping[str, Load], Count()] = field(default_factory=dict)
    points: Sequence[Load] = ()
    one: Load | None = None


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
    ],
)
def test_an_error_names_the_place_and_the_values_allowed(more: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        checked(**more)
    assert str(raised.value) == error


# -- what a study refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "changes", "text"),
    [
        (
            "migration",
            {"figures/migration/comparisons/0/over": "fcfs"},
            "figures.migration.comparisons: unknown system 'fcfs'",
        ),
        (
            "paper_fig13",
            {"figures/batched/comparisons/0/cases": ["x"]},
            "figures.batched.comparisons: unknown case 'x'",
        ),
    ],
)
def test_a_study_refuses_invalid_settings(
    experiment: str, changes: Mapping[str, Any], text: str
) -> None:
    settings: Any = settings_of(f"experiment={experiment}")["study"]
    for path, value in changes.items():
        *outer, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        inner = settings
        for key in outer:
            inner = inner[key]
        inner[last] = value
    with pytest.raises(ConfigError, match=text):
        make("study", settings, Study)
