"""What came out of a study that is more than a comparison: numbers, pictures' data, words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DIGITS = 6
"""Significant ones in a record: enough to tell results apart, few enough to read."""

PUBLISHED = ("published", "ours")
"""What the numbers of a row are called, unless a study says otherwise."""


@dataclass(frozen=True)
class Row:
    """One number beside the one that was published."""

    what: str
    ours: float
    published: float | tuple[float, float] | None = None
    """A number, or the range of what was published; None: nothing to hold ours against."""
    unit: str = ""
    why: str = ""
    """Why they differ, where they do."""

    @property
    def difference(self) -> float:
        """Ours over the published, less 1; 0 within a range; NaN where there is none."""
        if self.published is None:
            return math.nan
        near = self.published
        if isinstance(near, tuple):
            near = min(max(self.ours, near[0]), near[1])
        if not near:
            return 0.0 if self.ours == near else math.nan
        return self.ours / near - 1

    def record(self) -> dict[str, Any]:
        """As a file has it."""
        published = list(self.published) if isinstance(self.published, tuple) else self.published
        return {
            "what": self.what,
            "ours": self.ours,
            "published": published,
            "difference": self.difference,
            "unit": self.unit,
            "why": self.why,
        }


@dataclass(frozen=True)
class Listing:
    """A table of texts; the first column names its rows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """What its numbers are, in a sentence."""


@dataclass(frozen=True)
class Result:
    """All that a reader is told."""

    name: str
    """Of the experiment."""
    title: str
    question: str
    command: str
    finding: Sequence[str]
    """Sentences, the most telling first."""
    rows: Sequence[Row] = ()
    beside: tuple[str, str] = PUBLISHED
    """What they hold against each other, by name."""
    listings: Sequence[Listing] = ()
    source: str = ""
    """Where the published numbers are from."""
    notes: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the pictures are drawn from."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """What is missing, and why."""
    again: Mapping[str, str] = field(default_factory=dict)
    """Further commands, by what each does."""

    def record(self, pictures: Sequence[str] = ()) -> dict[str, Any]:
        """As result.json has it: the same on every machine with the same packages.

        `pictures`: names of those in plots/ that show it, the most telling first.
        """
        content = {
            "experiment": self.name,
            "title": self.title,
            "command": self.command,
            "finding": list(self.finding),
            "source": self.source,
            "rows": [row.record() for row in self.rows],
            "notes": list(self.notes),
            "data": dict(self.data),
            "pictures": list(pictures),
            **({"failed": dict(self.failed)} if self.failed else {}),
        }
        rounded: dict[str, Any] = _rounded(content)
        return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    return value
