"""Constraints of settings: what is made, and how errors name the place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from experiments.papers.settings import Count, In, Names, Number, Positive, Range, check_settings
from pagedsim.core import ConfigError


@dataclass(frozen=True, kw_only=True)
class Load:
    rates: Annotated[Mapping[str, Sequence[float]], In("systems"), Number(above=0)]
    bound: Positive | None = None
    own: Names | None = None
    of: Annotated[str | None, In("loads")] = None


@dataclass(frozen=True, kw_only=True)
class Study:
    systems: Annotated[Names, Count(2)]
    base: Annotated[str, In("systems")] = "a"
    others: Annotated[Sequence[str], In("systems")] = ()
    loads: Annotated[Mapping[str, Load], Count()] = field(default_factory=dict)
    points: Sequence[Load] = ()
    one: Load | None = None
    published: Annotated[Sequence[float], Range()] = (1, 2)
    seeds: Annotated[int, Number(1, whole=True)] = 1
    pair: Annotated[Sequence[float], Count(2, 2)] = (1, 2)


SYSTEMS = {"a": ["policy=fcfs"], "b": []}
LOAD = {"rates": {"a": [1, 2]}}


def checked(**more: Any) -> Study:
    study = Study(**{"systems": SYSTEMS, "loads": {"chat": LOAD}, **more})
    check_settings(study)
    return study


def test_nested_settings_become_objects() -> None:
    study = checked(points=[LOAD], one=LOAD | {"bound": 3.0})
    assert study.loads["chat"] == study.points[0] == Load(rates={"a": [1, 2]})
    assert study.one == Load(rates={"a": [1, 2]}, bound=3.0)


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
        ({"loads": {"x": LOAD | {"bound": -1.0}}}, "loads.x.bound=-1.0: must be a number above 0"),
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
