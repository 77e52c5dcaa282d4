"""The tables of a result, in words: what was published beside what came out, and all others."""

from __future__ import annotations

import math

from pagedsim.metrics.result import Listing, Result, Row
from pagedsim.report.percent import signed


def tables(result: Result) -> list[Listing]:
    """All of them; first what was published beside what came out."""
    if not result.rows:
        return list(result.listings)
    held = any(row.published is not None for row in result.rows)
    theirs, ours = result.beside
    head = ["", theirs, ours, "difference"] if held else ["", ours]
    rows = [_cells(row) if held else [row.what, _text(row.ours, row.unit)] for row in result.rows]
    title = f"{theirs.capitalize()} and {ours}" if held else "Results"
    return [Listing(title, head, rows), *result.listings]


def reasons(result: Result) -> list[str]:
    """Why numbers differ from those that were published, a line each."""
    return [f"{row.what}: {row.why}" for row in result.rows if row.why]


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
