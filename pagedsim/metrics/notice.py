"""Notices on a run's requests, with counts that can be summed over seeds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

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
    for one in every:
        kinds.setdefault(_NUMBER.sub("", one.what), {})[one.what] = None
    return [
        one if one.count else replace(one, what=_spanning(kinds[_NUMBER.sub("", one.what)]))
        for one in every
    ]


def as_records(notices: Iterable[Notice]) -> list[dict[str, Any]]:
    """As JSON for a summary."""
    return [asdict(notice) for notice in notices]


def added_up(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The notices of an arm's seeds as lines, each with the number of seeds it applies to."""
    every = of_one_kind(Notice(**record) for one in summaries for record in one.get("notices", ()))
    requests = sum(one.get("requests", 0) for one in summaries)
    lines = []
    for what in dict.fromkeys(notice.what for notice in every):
        same = [notice for notice in every if notice.what == what]
        count = sum(notice.count for notice in same)
        whole = f"of {requests:,} " if same[0].of else ""
        line = f"{count:,} {whole}{what}" if count else what
        line += _in_seeds(len(same), len(summaries))
        lines.append(f"{line}; {same[0].more}" if same[0].more else line)
    return lines


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
