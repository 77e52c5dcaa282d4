"""The result of a study: finding, numbers, tables, notes and plot data; and notices on its runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pagedsim.metrics.stability import load_note

DIGITS = 6
"""Significant digits in a record."""

PUBLISHED = ("published", "ours")
"""Default names of the two numbers of a row."""
Published = float | tuple[float | None, float | None] | None
"""A number, or a range that is open where an end is None; None without a published value."""


@dataclass(frozen=True)
class Row:
    """One number beside the published one."""

    what: str
    ours: float
    published: Published = None
    unit: str = ""
    why: str = ""
    """Why they differ, if they do."""
    up_to: bool = False
    """Whether the published number is the largest of several, with which ours is compared."""

    @property
    def difference(self) -> float:
        """ours / published - 1; 0 within a range; NaN without a published value."""
        if self.published is None:
            return math.nan
        near = self.published
        if isinstance(near, tuple):
            low, high = near
            near = self.ours if low is None else max(self.ours, low)
            near = near if high is None else min(near, high)
        if not near:
            return 0.0 if self.ours == near else math.nan
        return self.ours / near - 1

    def record(self) -> dict[str, Any]:
        published = list(self.published) if isinstance(self.published, tuple) else self.published
        return {
            "what": self.what,
            "ours": self.ours,
            "published": published,
            "difference": self.difference,
            "unit": self.unit,
            "why": self.why,
            **({"up_to": True} if self.up_to else {}),
        }


@dataclass(frozen=True)
class Listing:
    """A table of strings; the first column names its rows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """An explanation of its numbers in one sentence."""

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str]], note: str = "") -> Listing:
        """From one row or more by heading; the first row has all headings."""
        head = list(rows[0])
        return cls(title, head, [[row[name] for name in head] for row in rows], note)


@dataclass(frozen=True, kw_only=True)
class Conclusions:
    """What the runs of a study show."""

    finding: Sequence[str]
    """Sentences, the most important first."""
    rows: Sequence[Row] = ()
    """Numbers, beside those that were published."""
    beside: tuple[str, str] = PUBLISHED
    """The headings of the two columns: the reference, and ours."""
    listings: Sequence[Listing] = ()
    notes: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """All numbers, as plain lists and mappings: for result.json, and to draw from."""
    brief: bool = False
    """Whether the terminal shows the finding and a short table, and the report has the rest."""
    again: Mapping[str, str] = field(default_factory=dict)
    """Further commands that a reader may want, by what each does."""
    launch: str = ""
    """What starts the answer as a real server, or the values of a real fleet, in lines."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """What is missing, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Result(Conclusions):
    """Everything in a report."""

    name: str
    title: str
    question: str
    command: str
    source: str = ""
    """Source of the published numbers."""
    made_by: Mapping[str, str] = field(default_factory=dict)
    """The version of pagedsim and, where it is known, the commit."""

    def record(self, pictures: Sequence[str] = ()) -> dict[str, Any]:
        """The content of result.json: equal on every machine with the same packages, but for
        the commit.

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
            **({"pagedsim": dict(self.made_by)} if self.made_by else {}),
            **({"launch": self.launch.splitlines()} if self.launch else {}),
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


_COUNTED = re.compile(r"([\d,]+) (?:of ([\d,]+) )?(.+)")
_NUMBER = re.compile(r"(?<= )-?\d+(?:\.\d+)?%?(?= |$)")


@dataclass(frozen=True)
class Notice:
    """`what` holds for `count` of `of` requests; `more` is an example.

    `of` is 0 without a total, and `count` is 0 without a count.
    """

    what: str
    count: int = 0
    of: int = 0
    more: str = ""


def notice_of(text: str) -> Notice:
    """Parse the counts of a line such as "4 of 240 requests were cut"."""
    if match := _COUNTED.fullmatch(text):
        count, of = (int((number or "0").replace(",", "")) for number in match.groups()[:2])
        return Notice(match[3], count, of)
    return Notice(text)


def of_one_kind(notices: Iterable[Notice]) -> list[Notice]:
    """Unify notices without a count that differ only in numbers, replacing each number by its
    range.

    >>> {one.what for one in of_one_kind([Notice("off by 3 %"), Notice("off by 5 %")])}
    {'off by 3 to 5 %'}
    """
    every = list(notices)
    kinds: dict[str, dict[str, None]] = {}
    for notice in every:
        kinds.setdefault(_NUMBER.sub("", notice.what), {})[notice.what] = None
    return [
        notice
        if notice.count
        else replace(notice, what=_spanning(kinds[_NUMBER.sub("", notice.what)]))
        for notice in every
    ]


def as_records(notices: Iterable[Notice]) -> list[dict[str, Any]]:
    """As JSON for a summary."""
    return [asdict(notice) for notice in notices]


def added_up(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The notices of an arm's seeds as lines, each with the number of its seeds, and a note on
    overload from all seeds."""
    every = of_one_kind(
        Notice(**record) for summary in summaries for record in summary.get("notices", ())
    )
    requests = sum(summary.get("requests", 0) for summary in summaries)
    lines = []
    for what in dict.fromkeys(notice.what for notice in every):
        same = [notice for notice in every if notice.what == what]
        count = sum(notice.count for notice in same)
        whole = f"of {requests:,} " if same[0].of else ""
        line = f"{count:,} {whole}{what}" if count else what
        line += _in_seeds(len(same), len(summaries))
        lines.append(f"{line}; {same[0].more}" if same[0].more else line)
    load = load_note(summaries)
    return lines if load is None else [*lines, load]


def of_whom(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines by arm, each once, with the names of its arms where it is not of all."""
    whose: dict[str, list[str]] = {}
    for arm, texts in lines.items():
        for text in texts:
            whose.setdefault(text, []).append(arm)
    return [
        text if len(arms) == len(lines) else f"{', '.join(arms)}: {text}"
        for text, arms in whose.items()
    ]


def _in_seeds(some: int, seeds: int) -> str:
    if seeds == 1:
        return ""
    return f" (in all {seeds} seeds)" if some == seeds else f" (in {some} of {seeds} seeds)"


def _spanning(texts: Iterable[str]) -> str:
    """One text with ranges for texts that differ only in numbers."""
    first, *_ = several = list(texts)
    spans = map(_span, zip(*map(_NUMBER.findall, several), strict=True))
    return _NUMBER.sub(lambda _: next(spans), first)


def _span(numbers: Iterable[str]) -> str:
    ordered = sorted(numbers, key=lambda number: float(number.rstrip("%")))
    least, most = ordered[0], ordered[-1]
    return least if least == most else f"{least} to {most}"
