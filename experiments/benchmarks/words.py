"""The words of a benchmark's command line: numbers and files that it can work with, or one line."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from math import isfinite
from pathlib import Path
from typing import NoReturn


class Parser(ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists what there is\n")


def at_least_zero(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def each_at_least_one(text: str) -> list[int]:
    """Whole numbers of at least 1, with commas between them."""
    return [at_least_one(one) for one in text.split(",")]


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text}: must be a whole number of at least {least}")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number > 0 and isfinite(number)):
        raise ArgumentTypeError(f"{text}: must be a number above 0")
    return number


def existing(text: str) -> str:
    """The path of a file that is there."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f"{text}: there is no such file")
    return text
