"""Calls that are refused: by a line that names the setting, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedsim.core import ConfigError, PagedsimError


def refusal(
    call: Callable[[], object], named: str = "", error: type[PagedsimError] = ConfigError
) -> str:
    """The line by which a call is refused. It has each of the texts between the bars of `named`."""
    with pytest.raises(error) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    for text in named.split(" | "):
        assert text in line, f"{line!r} does not name {text}"
    return line
