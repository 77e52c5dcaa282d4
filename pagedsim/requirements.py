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
        (name, installed, bound)
        for name, bound in _bounds(extra)
        if (installed := _older(name, bound))
    ]
    if older:
        stated = ", ".join(
            f"{name} {installed} (at least {bound})" for name, installed, bound in older
        )
        install = " ".join(f"'{name}>={bound}'" for name, _, bound in older)
        raise ConfigError(f"older than pagedsim needs: {stated}: pip install --upgrade {install}")


def _bounds(extra: str) -> Iterator[tuple[str, str]]:
    """The libraries of an extra and their lowest versions."""
    try:
        stated = requires("pagedsim") or ()
    except PackageNotFoundError:
        return
    for text in stated:
        match = _REQUIREMENT.match(text)
        if match is not None and (match[3] or "") == extra:
            yield match[1], match[2]


def _older(name: str, bound: str) -> str:
    """The version that is installed, if it is lower than the bound; else nothing."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return ""
    return installed if numbers(installed) < numbers(bound) else ""


def numbers(text: str) -> list[int]:
    """The numbers of a release, without zeros at the end: 1.3.0 is 1.3."""
    match = _RELEASE.match(text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
