"""Kinds of settings: what a study is given by hand is what its fields say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.run.objects import require_kinds


@dataclass(frozen=True)
class Study:
    """One field of each kind."""

    rate: float = 1.0
    count: int = 1
    name: str = "x"
    sizes: Sequence[int] = (1, 2)
    arms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    loads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    variants: Mapping[str, float] | None = None
    anything: Any = None
    maker: object = None

    def __post_init__(self) -> None:
        require_kinds(self)


def test_what_fits_is_taken() -> None:
    Study(rate=2, sizes=[], arms={"a": []}, loads={"b": {"c": 1}}, variants={"d": 1}, anything="x")
    Study(variants=None, maker=3)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rate": "x"}, "^rate='x': must be a number$"),
        ({"rate": None}, "^rate=None: must be a number$"),
        ({"rate": float("nan")}, "^rate=nan: must be a number$"),
        ({"count": 1.5}, "^count=1.5: must be a whole number$"),
        ({"count": True}, "^count=True: must be a whole number$"),
        ({"name": 5}, "^name=5: must be a text$"),
        ({"sizes": 5}, "^sizes=5: must be a list$"),
        ({"sizes": "16"}, "^sizes='16': must be a list$"),
        ({"sizes": [1, "x"]}, "^sizes='x': must be a whole number$"),
        ({"arms": [1]}, r"^arms=\[1\]: must be a mapping of names to settings$"),
        ({"arms": {"a": 3}}, "^arms.a=3: must be a list$"),
        ({"arms": {"a": [3]}}, "^arms.a=3: must be a text$"),
        ({"loads": {"a": 3}}, "^loads.a=3: must be a mapping of names to settings$"),
        ({"variants": 5}, "^variants=5: must be a mapping of names to settings$"),
        ({"variants": {"a": None}}, "^variants.a=None: must be a number$"),
    ],
)
def test_what_does_not_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Study(**settings)
