"""Whether installed libraries are as new as pagedsim needs them: one line before a command begins,
in place of an error from inside a library after it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from pagedsim.core.errors import ConfigError

_REQUIREMENT = re.compile(r"""([\w-]+)(?:\[\w+\])?>=([\d.]+)(?:.*extra == ['"](\w+)['"])?""")
_RELEASE = re.compile(r"\d+(?:\.\d+)*")


@cache
def refuse_older(extra: str = "") -> None:
    """Raise ConfigError where a library of an extra (none: of every installation) is too old.

    Missing ones are left to the code that needs them. Sources that are not installed state nothing.
    """
    older = [
        (name, there, bound) for name, bound in _bounds(extra) if (there := _older(name, bound))
    ]
    if older:
        stated = ", ".join(f"{name} {there} (at least {bound})" for name, there, bound in older)
        install = " ".join(f"'{name}>={bound}'" for name, _, bound in older)
        raise ConfigError(f"older than pagedsim needs: {stated}: pip install --upgrade {install}")


def _bounds(extra: str) -> Iterator[tuple[str, str]]:
    """The libraries of an extra and their lowest versions."""
    try:
        stated = requires("pagedsim") or ()
    except PackageNotFoundError:
        return
    for text in stated:
        found = _REQUIREMENT.match(text)
        if found is not None and (found[3] or "") == extra:
            yield found[1], found[2]


def _older(name: str, bound: str) -> str:
    """The version that is installed, if it is lower than the bound; else nothing."""
    try:
        there = version(name)
    except PackageNotFoundError:
        return ""
    return there if numbers(there) < numbers(bound) else ""


def numbers(text: str) -> list[int]:
    """The numbers of a release, without zeros at the end: 1.3.0 is 1.3."""
    found = _RELEASE.match(text)
    numbers = [int(one) for one in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
