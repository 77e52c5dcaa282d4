"""The study on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedsim.metrics.catalogue import label_of, metric_of
from pagedsim.metrics.compare import baseline_of
from pagedsim.metrics.finding import finding
from pagedsim.metrics.study import Study
from pagedsim.report.table import Cell, Section, sections

_MANY = 4
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
    parts = parts[:1] if len(study.arms) > _MANY else parts
    for table in _tables(study, parts, console.width):
        console.print(table)
    console.print(Text(_note(study), style="dim"))


def _tables(study: Study, parts: list[Section], width: int) -> Iterator[Table]:
    """One table, or several with some of the columns each where the terminal is narrow."""
    names = max(len(name) for name in (*study.arms, *(part.title for part in parts[1:]))) + 4
    some: list[str] = []
    left = width - names
    for key in parts[0].keys:
        needed = _width(parts, key)
        if some and left < needed:
            yield _table(study, parts, some)
            some, left = [], width - names
        some.append(key)
        left -= needed
    yield _table(study, parts, some)


def _width(parts: list[Section], key: str) -> int:
    """Characters that a column and its borders cannot do without; headings break at spaces."""
    cells = [
        row[part.keys.index(key)]
        for part in parts
        if key in part.keys
        for row in part.rows.values()
    ]
    texts = [*label_of(key).split(), *(text for cell in cells for text in (cell.text, cell.change))]
    return max(map(len, texts)) + 3


def _table(study: Study, parts: list[Section], keys: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(study.swept.rpartition(".")[2] if study.swept else "", no_wrap=True)
    for key in keys:
        # The statistic goes below the name of its latency; other names break where they must.
        label = "\n".join(label_of(key).rsplit(" ", 1)) if metric_of(key).latency else label_of(key)
        table.add_column(label, justify="right", min_width=_width(parts, key) - 3)
    for part in parts:
        if len(parts) > 1:
            table.add_row(Text(part.title, style="bold"))
        _add_rows(table, part, keys, indent="  " if len(parts) > 1 else "")
    return table


def _add_rows(table: Table, part: Section, keys: list[str], indent: str) -> None:
    last = list(part.rows)[-1]
    for arm, cells in part.rows.items():
        by_key = dict(zip(part.keys, cells, strict=True))
        texts = [_cell(by_key[key]) if key in by_key else Text("–") for key in keys]
        table.add_row(indent + arm, *texts, end_section=bool(indent) and arm == last)


def _cell(cell: Cell) -> Text:
    text = Text(cell.text, style="bold" if cell.best else "", justify="right")
    if cell.change:
        text.append(f"\n{cell.change}", style=f"not bold {_STYLES[cell.verdict]}")
    return text


def _note(study: Study) -> str:
    seeds = max(len(study.of(arm)) for arm in study.arms)
    note = f"Means over {seeds} seeds" if seeds > 1 else "One seed, no confidence intervals"
    if len(study.arms) > 1:
        note += f"; bold: best; below: against {baseline_of(study)}"
        note += ", grey where not sure (95 %)" if seeds > 1 else ""
    return note + "."
