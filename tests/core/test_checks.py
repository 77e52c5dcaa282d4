"""The rules that settings are held to wherever they are read, and the one line that each says."""

import math
import re
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_number, require_whole


def refused(value: object, allowed: str) -> Any:
    """The error, with exactly this message."""
    return pytest.raises(ConfigError, match=f"^{re.escape(f'k={value!r}: must be {allowed}')}$")


NUMBERS: list[tuple[dict[str, float], str, list[float], list[float]]] = [
    ({}, "", [-1, 0.5, np.float64(2)], []),
    ({"low": 0}, " of at least 0", [0, 7], [-1e-9]),
    ({"above": 0}, " above 0", [1e-9], [0, -1]),
    ({"low": 0.001, "high": 0.5}, " from 0.001 to 0.5", [0.001, 0.5], [0, 1]),
    ({"above": 0, "high": 1}, " above 0, at most 1", [0.1, 1], [0, 1.1]),
    ({"low": 0, "below": 1}, " of at least 0, below 1", [0, 0.9], [-0.1, 1]),
]
NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, 10**400, "1", None, True, [1]]


@pytest.mark.parametrize(("bounds", "allowed", "fine", "beyond"), NUMBERS)
def test_a_number_within_bounds(
    bounds: dict[str, float], allowed: str, fine: list[float], beyond: list[float]
) -> None:
    for value in fine:
        assert require_number("k", value, **bounds) == value
        assert type(require_number("k", value, **bounds)) is float
    for value in (*beyond, *NO_NUMBERS):
        with refused(value, f"a number{allowed}"):
            require_number("k", value, **bounds)


@pytest.mark.parametrize(
    ("bounds", "allowed", "fine", "beyond"),
    [
        ({}, "", [-1, np.int64(3)], []),
        ({"low": 1}, " of at least 1", [1], [0]),
        ({"low": 1, "high": 10**6}, " from 1 to 1000000", [1, 10**6], [0, 10**6 + 1]),
    ],
)
def test_a_whole_number_within_bounds(
    bounds: dict[str, int], allowed: str, fine: list[int], beyond: list[int]
) -> None:
    for value in fine:
        assert require_whole("k", value, **bounds) == value
        assert type(require_whole("k", value, **bounds)) is int
    others: list[Any] = [*beyond, 1.0, "1", None, True]
    for value in others:
        with refused(value, f"a whole number{allowed}"):
            require_whole("k", value, **bounds)


def test_true_or_false() -> None:
    assert require_flag("k", False) is False
    for value in ("no", 0, None):
        with refused(value, "true or false"):
            require_flag("k", value)
