"""Terminal output of a study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import fill

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.result import Listing, Result
from pagedsim.report.table import (
    Cell,
    Section,
    keys_in,
    means_over,
    reasons,
    sections,
    tables,
    versus,
)

_MANY = 4
_ROWS = (4, 12)
"""The fewest and the most rows in the table of a brief result."""
_SCREEN = 44
"""Lines of its finding, its notes and its table, whose rows take about two each."""
_NAME = 24
"""Width of an arm's name, above which it is wrapped."""
_BORDER = 3
"""Characters between columns with borders."""
_GAP = 2
"""Characters between columns without borders."""
_LONG = 28
"""A column with a text longer than this is a text column."""
_WORD = 12
"""A longer heading of a number column is wrapped at its first space."""
_LEAST = 14
"""Minimum width of a text column."""
_STYLES = {"better": "green", "worse": "red", "unsure": "dim"}


def show(result: Result, arms: Arms | None = None, console: Console | None = None) -> None:
    """Print the finding, the table of `arms` and metrics, and the other tables."""
    console = console or Console(highlight=False)
    console.print()
    console.print(Text(result.title, style="bold"))
    for sentence in result.finding:
        console.print(Text(sentence))
    if arms is not None:
        _show_arms(arms, console)
    short = _short(result, console.width) if result.brief else result
    for listing in tables(short):
        console.print()
        for part in listings(listing, console.width):
            console.print(part)
        if listing.note:
            console.print(Text(listing.note, style="dim"))
    if result.brief and (beyond := _beyond(result, len(short.rows))):
        console.print(Text(f"In the report: {', '.join(beyond)}.", style="dim"))
    else:
        for reason in reasons(result):
            console.print(Text(reason, style="dim"))
    for what, why in result.failed.items():
        console.print(Text(f"missing: {what}: {why}"), soft_wrap=True)
    for note in result.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)


def _short(result: Result, width: int) -> Result:
    """With no other table, and with as many rows as finding and notes leave room for on a screen:
    the first that have a published number, if any has one."""
    taken = sum(-(-len(line) // width) for line in (*result.finding, *result.notes))
    least, most = _ROWS
    rows = [row for row in result.rows if row.published is not None] or result.rows
    return replace(result, rows=rows[: max(least, min(most, (_SCREEN - taken) // 2))], listings=())


def _beyond(result: Result, shown: int) -> list[str]:
    """What a brief result leaves to the page."""
    left = len(result.rows) - shown
    parts = [f"{left} more row{'s' * (left > 1)}"] if left else []
    parts += ["reasons for differences"] if reasons(result) else []
    listings = [f"“{listing.title}” ({len(listing.rows)} rows)" for listing in result.listings]
    return [*parts, *listings]


def _show_arms(arms: Arms, console: Console) -> None:
    console.print()
    parts = sections(arms)
    # With many arms only the section of all requests is printed; the page has the others.
    if len(arms.arms) > _MANY:
        parts = [part for part in parts if part.client is None]
    if len(arms.cells) > _MANY:
        parts = [part for part in parts if part.at == arms.focus[0]]
    if not any(part.keys for part in parts):  # nothing was measured
        return
    for table in _tables(arms, parts, console.width):
        console.print(table)
    console.print(Text(_note(arms, parts), style="dim"))


def listings(listing: Listing, width: int, names: int = 1) -> Iterator[Table]:
    """One table, or several if the terminal is narrow; the first has the title, and all have the
    first `names` columns, which name the rows."""
    columns = [_Column.of(listing, number) for number in range(len(listing.head))]
    widths = [column.least + _GAP for column in columns]
    title = listing.title
    # Rich before 14.3 pads the edges of a table in which columns have a least width.
    for some in _fitting(widths[names:], width - sum(widths[:names])):
        yield _listing([*columns[:names], *(columns[names + number] for number in some)], title)
        title = ""


def _listing(columns: Sequence[_Column], title: str) -> Table:
    """A table with right-aligned numbers; only text columns are wrapped."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    if title:
        table.title, table.title_justify = Text(title, style="italic"), "left"
    for column in columns:
        table.add_column(
            Text(column.label),
            justify="left" if column.words else "right",
            overflow="fold",
            no_wrap=not column.words,
            min_width=column.least,
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


@dataclass(frozen=True)
class _Column:
    """A column of a listing."""

    label: str
    cells: Sequence[str]
    words: bool

    @classmethod
    def of(cls, listing: Listing, number: int) -> _Column:
        cells = [row[number] for row in listing.rows]
        words = number == 0 or max(map(len, cells), default=0) > _LONG
        name = listing.head[number]
        label = name.replace(" ", "\n", 1) if not words and len(name) > _WORD else name
        return cls(label, cells, words)

    @property
    def least(self) -> int:
        """Minimum width in characters."""
        longest = max(map(len, (*self.label.split("\n"), *self.cells)))
        return min(longest, _LEAST) if self.words else longest


def _fitting(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Split columns into groups that fit the width, at least one each."""
    some: list[int] = []
    left = room
    for number, needed in enumerate(widths):
        if some and left < needed:
            yield some
            some, left = [], room
        some.append(number)
        left -= needed
    yield some


def _tables(study: Arms, parts: list[Section], width: int) -> Iterator[Table]:
    """One table, or several with a subset of the columns each if the terminal is narrow."""
    titles = [part.title for part in parts] if len(parts) > 1 or parts[0].at else []
    indent = 2 if titles else 0
    arms = [arm for part in parts for arm in part.rows]
    names = max(*(len(arm) + indent for arm in arms), *map(len, (*titles, study.swept_key)))
    names = min(names, _NAME) + 2  # table edges
    keys = keys_in(parts)
    for some in _fitting([_width(parts, key) + _BORDER for key in keys], width - names):
        chosen = [keys[number] for number in some]
        described = [part for part in parts if not set(chosen).isdisjoint(part.keys)]
        yield _table(study, described, chosen, titled=bool(titles))


def _width(parts: list[Section], key: str) -> int:
    """Minimum width of a column in characters; headings wrap at spaces."""
    cells = [row[key] for part in parts for row in part.rows.values() if key in row]
    numbers = (text for cell in cells for text in (cell.text, cell.marked))
    texts = [*label_of(key).split(), *numbers]
    return max(map(len, texts))


def _table(study: Arms, parts: list[Section], keys: list[str], titled: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(Text(study.swept_key), max_width=_NAME, overflow="fold")
    for key in keys:
        width = _width(parts, key)
        label = fill(label_of(key), width, break_long_words=False)
        table.add_column(label, justify="right", min_width=width)
    for part in parts:
        if titled:
            table.add_row(Text(part.title, style="bold"))
        _add_rows(table, part, keys, indent=2 if titled else 0)
    return table


def _add_rows(table: Table, part: Section, keys: list[str], indent: int) -> None:
    last = list(part.rows)[-1]
    for arm, cells in part.rows.items():
        texts = [_cell(cells[key]) if key in cells else Text("–") for key in keys]
        table.add_row(
            Padding(Text(arm), (0, 0, 0, indent)), *texts, end_section=bool(indent) and arm == last
        )


def _cell(cell: Cell) -> Text:
    text = Text(cell.text, style="bold" if cell.best else "", justify="right")
    if cell.change:
        text.append(f"\n{cell.marked}", style=f"not bold {_STYLES[cell.verdict]}")
    return text


def _note(study: Arms, parts: Sequence[Section]) -> str:
    seeds = max(len(study.of(arm)) for arm in study.arms)
    note = means_over(study, parts)
    if len(study.arms) > 1:
        note += f"; bold: best mean; below: against {versus(study)}"
        note += ", seed by seed, in brackets where not sure (95 %)" if seeds > 1 else ""
        if len(study.cells) > _MANY:
            note += f"; {len(study.cells) - 1} more such tables are in the report"
        if not study.same_requests:
            note += ". The arms had different workloads, drawn from the same seeds"
    return note + "."
