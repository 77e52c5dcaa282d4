"""A result on the terminal and as a page: what was published, what came out, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedsim.metrics.files import write_json
from pagedsim.metrics.result import Listing, Result, Row
from pagedsim.report.percent import signed
from pagedsim.report.pictures import Drawing, write_illustrated

if TYPE_CHECKING:
    pass

RESULT = "result.json"


def show_result(result: Result, console: Console | None = None) -> None:
    """Print the finding and the tables."""
    console = console or Console(highlight=False)
    console.print()
    console.print(Text(result.title, style="bold"))
    for sentence in result.finding:
        console.print(Text(sentence))
    for listing in _listings(result):
        console.print()
        console.print(_table(listing))
    for row in result.rows:
        if row.why:
            console.print(Text(f"{row.what}: {row.why}", style="dim"))
    for note in result.notes:
        console.print(Text(f"note: {note}"))


def write_result(
    result: Result, drawings: Mapping[str, Drawing] | None, folder: Path
) -> Path | None:
    """Write result.json, plots/<name>.png and report.html, whose path is returned.

    Without `drawings` (None), result.json alone.
    """
    write_json(folder / RESULT, replace(result, pictures=list(drawings or ())).record())
    if drawings is None:
        return None
    return write_illustrated(folder, result.title, _head(result), drawings, _tail(result))


def _head(result: Result) -> list[str]:
    found = "".join(f"<p>{escape(sentence)}</p>" for sentence in result.finding)
    notes = "".join(f'<p class="sure">Note: {escape(note)}.</p>' for note in result.notes)
    return [
        f'<p class="eyebrow">pagedsim study · {escape(result.name)}</p>',
        f"<h1>{escape(result.title)}</h1>",
        f'<p class="question">{escape(result.question)}</p>',
        f'<section class="finding">{found}{notes}</section>',
        *map(_html, _listings(result)),
        *(f'<p class="note">{escape(r.what)}: {escape(r.why)}</p>' for r in result.rows if r.why),
    ]


def _tail(result: Result) -> list[str]:
    source = f'<p class="note">Published: {escape(result.source)}</p>' if result.source else ""
    command = f"<h2>To run it again</h2><pre><code>{escape(result.command)}</code></pre>"
    return [source, command]


def _listings(result: Result) -> list[Listing]:
    """Its tables; first what was published beside what came out."""
    if not result.rows:
        return list(result.listings)
    held = any(row.published is not None for row in result.rows)
    head = ["", "published", "ours", "difference"] if held else ["", "ours"]
    rows = [_cells(row) if held else [row.what, _text(row.ours, row.unit)] for row in result.rows]
    return [Listing("Published and ours" if held else "Results", head, rows), *result.listings]


def _cells(row: Row) -> list[str]:
    published = row.published
    if isinstance(published, tuple):
        text = f"{_text(published[0])} to {_text(published[1], row.unit)}"
        return [row.what, text, _text(row.ours, row.unit), _within(row)]
    text = "–" if published is None else _text(published, row.unit)
    return [row.what, text, _text(row.ours, row.unit), signed(row.difference)]


def _within(row: Row) -> str:
    return "within" if row.difference == 0 else signed(row.difference)


def _text(value: float, unit: str = "") -> str:
    if math.isnan(value):
        return "–"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def _table(listing: Listing) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left")
    if listing.title:
        table.title = listing.title
    for number, name in enumerate(listing.head):
        table.add_column(name, justify="right" if number else "left")
    for row in listing.rows:
        table.add_row(*row)
    return table


def _html(listing: Listing) -> str:
    from pagedsim.report.html import grid

    return f"<h2>{escape(listing.title)}</h2>{grid(listing.head, listing.rows)}"
