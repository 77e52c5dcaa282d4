"""Our numbers in the tables of published.md are those of the committed results."""

from __future__ import annotations

import re
from fnmatch import filter as matching

import pytest

from pagedsim.experiments.regenerate import RESULTS, committed
from pagedsim.metrics.files import RESULT, read_json

NOT_OURS = ("", "published", "before")
"""Headings of columns that no result of ours stands in."""
NUMBER = re.compile(r"−?\d[\d,]*(?:\.\d+)?")
SECTIONS = (RESULTS / "published.md").read_text(encoding="utf-8").split("\n## ")[1:]


def named_results(section: str) -> list[str]:
    """The committed results that a section names in backticks."""
    spans = re.findall(r"`([^`\n]+)`", section)
    return [name for span in spans for name in matching(committed(), span)]


def our_cells(section: str) -> list[str]:
    """What stands in the columns of ours, of all tables."""
    cells = []
    for table in re.findall(r"(?:^\|.*\n?)+", section, re.M):
        lines = [line.split("|")[1:-1] for line in table.splitlines()]
        columns = [[cell.strip() for cell in column] for column in zip(*lines, strict=True)]
        cells += [cell for head, _, *ours in columns[1:] if head not in NOT_OURS for cell in ours]
    return cells


def numbers_in(text: str) -> list[str]:
    return [found.replace("−", "-").replace(",", "") for found in NUMBER.findall(text)]


def numbers_of(name: str) -> set[float]:
    """What a result has in its rows, with what these quote, and in its finding; shares in per cent,
    too."""
    result = read_json(RESULTS / name / RESULT)
    texts = [*result["finding"], *(row["why"] for row in result["rows"])]
    numbers = {float(number) for text in texts for number in numbers_in(text)}
    numbers |= {row["ours"] for row in result["rows"] if row["ours"] is not None}
    return numbers | {100 * number for number in numbers if abs(number) <= 1}


def lacking(cells: list[str], known: set[float]) -> list[str]:
    """The cells with a number that is none of the known ones, rounded to as many places."""

    def is_known(number: str) -> bool:
        half = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9
        return any(abs(float(number) - other) <= half for other in known)

    return [cell for cell in cells if not all(map(is_known, numbers_in(cell)))]


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(text, id=text.partition("\n")[0])
        for text in SECTIONS
        if "`hit_rate`" not in text  # its traces are not here
    ],
)
def test_our_numbers_are_those_of_the_committed_results(section: str) -> None:
    names, cells = named_results(section), our_cells(section)
    assert names and cells
    assert not lacking(cells, set().union(*map(numbers_of, names)))
