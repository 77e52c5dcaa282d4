"""What a reader must know of a run's requests, counted, so that seeds can be added up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_COUNTED = re.compile(r"([\d,]+) (?:of ([\d,]+) )?(.+)")


@dataclass(frozen=True)
class Notice:
    """`what` is true of `count` requests, out of `of`; `more` is about one of them.

    `of` is 0 where there is no whole, and `count` is 0 where nothing was counted.
    """

    what: str
    count: int = 0
    of: int = 0
    more: str = ""


def notice_of(text: str) -> Notice:
    """A line such as "4 of 240 requests were cut" with its counts read."""
    if match := _COUNTED.fullmatch(text):
        count, of = (int((number or "0").replace(",", "")) for number in match.groups()[:2])
        return Notice(match[3], count, of)
    return Notice(text)


def as_records(notices: Iterable[Notice]) -> list[dict[str, Any]]:
    """For a summary, which is JSON."""
    return [asdict(notice) for notice in notices]


def added_up(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The notices of an arm's seeds as lines, each with in how many of them it was so."""
    every = [Notice(**record) for one in summaries for record in one.get("notices", ())]
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
