"""The study on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.compare import baseline_of
from pagedsim.metrics.finding import finding
from pagedsim.metrics.study import Study
from pagedsim.report.table import Cell, Section, sections

_MANY = 4
_NAME = 24
"""Characters of an arm's name in a line; what is longer is broken."""
_BORDER = 3
"""Characters between two columns."""
_STYLES = {"better": "green", "worse": "red", "unsure": "dim"}


def show(study: Study, console: Console | None = None) -> None:
    """Print what was found: in words, then as a table of arms and metrics."""
    console = console or Console()
    console.print()
    console.print(Text(study.title, style="bold"))
    if not study.runs:
        console.print("No run was completed.")
        return
    for sentence in finding(study):
        console.print(Text(sentence))
    console.print()
    parts = sections(study)
    # Many arms in many groups are for the page; here all requests together must do.
    parts = parts[-1:] if len(study.arms) > _MANY else parts
    if not parts[-1].keys:  # nothing was measured
        return
    for table in _tables(study, parts, console.width):
        console.print(table)
    console.print(Text(_note(study), style="dim"))


def _tables(study: Study, parts: list[Section], width: int) -> Iterator[Table]:
    """One table, or several with some of the columns each where the terminal is narrow."""
    titles = [part.title for part in parts] if len(parts) > 1 else []
    indent = 2 if titles else 0
    names = max(*(len(arm) + indent for arm in study.arms), *map(len, titles), 0)
    names = min(names, _NAME) + 2  # the edges
    some: list[str] = []
    left = width - names
    for key in parts[-1].keys:  # all requests together: they have every column
        needed = _width(parts, key) + _BORDER
        if some and left < needed:
            yield _table(study, parts, some)
            some, left = [], width - names
        some.append(key)
        left -= needed
    yield _table(study, parts, some)


def _width(parts: list[Section], key: str) -> int:
    """Characters that a column cannot do without; headings break at spaces."""
    cells = [
        row[part.keys.index(key)]
        for part in parts
        if key in part.keys
        for row in part.rows.values()
    ]
    changes = map(_change, cells)
    texts = [*label_of(key).split(), *(cell.text for cell in cells), *changes]
    return max(map(len, texts))


def _table(study: Study, parts: list[Section], keys: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    swept = study.swept.rpartition(".")[2] if study.swept else ""
    table.add_column(swept, max_width=_NAME, overflow="fold")
    for key in keys:
        width = _width(parts, key)
        label = fill(label_of(key), width, break_long_words=False)
        table.add_column(label, justify="right", min_width=width)
    for part in parts:
        if len(parts) > 1:
            table.add_row(Text(part.title, style="bold"))
        _add_rows(table, part, keys, indent=2 if len(parts) > 1 else 0)
    return table


def _add_rows(table: Table, part: Section, keys: list[str], indent: int) -> None:
    last = list(part.rows)[-1]
    for arm, cells in part.rows.items():
        by_key = dict(zip(part.keys, cells, strict=True))
        texts = [_cell(by_key[key]) if key in by_key else Text("–") for key in keys]
        table.add_row(
            Padding(arm, (0, 0, 0, indent)), *texts, end_section=bool(indent) and arm == last
        )


def _cell(cell: Cell) -> Text:
    text = Text(cell.text, style="bold" if cell.best else "", justify="right")
    if cell.change:
        text.append(f"\n{_change(cell)}", style=f"not bold {_STYLES[cell.verdict]}")
    return text


def _change(cell: Cell) -> str:
    """In brackets where it is not sure: piped, the terminal's grey is lost."""
    return f"({cell.change})" if cell.change and cell.verdict == "unsure" else cell.change


def _note(study: Study) -> str:
    seeds = max(len(study.of(arm)) for arm in study.arms)
    note = f"Means over {seeds} seeds" if seeds > 1 else "One seed, no confidence intervals"
    if len(study.arms) > 1:
        note += f"; bold: best mean; below: against {baseline_of(study)}"
        note += ", seed by seed, in brackets where not sure (95 %)" if seeds > 1 else ""
        if not study.same_requests:
            note += ". The arms had different workloads, drawn from the same seeds"
    return note + "."
