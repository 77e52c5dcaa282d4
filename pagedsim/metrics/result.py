"""The result of a study: finding, numbers, tables, notes and plot data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DIGITS = 6
"""Significant digits in a record."""

PUBLISHED = ("published", "ours")
"""Default names of the two numbers of a row."""


@dataclass(frozen=True)
class Row:
    """One number beside the published one."""

    what: str
    ours: float
    published: float | tuple[float, float] | None = None
    """A number or a range; None without a published value."""
    unit: str = ""
    why: str = ""
    """Why they differ, if they do."""

    @property
    def difference(self) -> float:
        """ours / published - 1; 0 within a range; NaN without a published value."""
        if self.published is None:
            return math.nan
        near = self.published
        if isinstance(near, tuple):
            near = min(max(self.ours, near[0]), near[1])
        if not near:
            return 0.0 if self.ours == near else math.nan
        return self.ours / near - 1

    def record(self) -> dict[str, Any]:
        """The row as JSON."""
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
    """A table of strings; the first column names its rows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """An explanation of its numbers in one sentence."""


@dataclass(frozen=True)
class Result:
    """Everything in a report."""

    name: str
    """Name of the experiment."""
    title: str
    question: str
    command: str
    finding: Sequence[str]
    """Sentences, most important first."""
    rows: Sequence[Row] = ()
    beside: tuple[str, str] = PUBLISHED
    """Names of the two numbers of the rows."""
    listings: Sequence[Listing] = ()
    source: str = ""
    """Source of the published numbers."""
    notes: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data of the plots."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """What is missing, with the reason."""
    again: Mapping[str, str] = field(default_factory=dict)
    """Further commands, by purpose."""

    def record(self, pictures: Sequence[str] = ()) -> dict[str, Any]:
        """The content of result.json: equal on every machine with the same packages.

        `pictures` are names of plots in plots/, most important first.
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
