"""The page as a reader's browser gets it: whole, on its own, and with every number in it."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from pagedsim import report
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.compare import compare
from pagedsim.report import html
from pagedsim.report.figures import drawn
from pagedsim.report.plots import drawings_of
from pagedsim.report.table import sections
from pagedsim.report.timeline import write_timeline
from tests.metrics.tables import NAN, requests_of, result_of, steps_of, study_of, with_tables

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Collects texts and attributes, and holds that every tag is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


def written(study: Arms) -> Path:
    """The page of a comparison, with its pictures."""
    return report.write(result_of(study), drawings_of(study), study.folder, study)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("study")
    path = written(study_of(folder))
    assert path == folder / "report.html"
    for name in ("effect", "latency", "load", "requests"):
        assert (folder / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return path.read_text(encoding="utf-8")


def test_it_parses_and_escapes(page: str) -> None:
    text = " ".join(Reader(page).texts)
    assert "Who <goes> first?" in text
    assert "What does being urgent buy & cost?" in text
    assert "python -m pagedsim experiment=small 'a=<b>'" in text
    assert "<goes>" not in page


def test_it_stands_alone(page: str) -> None:
    """Nothing is fetched from elsewhere, and what is referred to is there once."""
    tags = Reader(page).tags
    assert not {tag for tag, _ in tags} & {"link", "script", "img", "iframe", "object", "image"}
    for _, attributes in tags:
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in page and not re.search(r"https?://", page)
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def test_the_page_names_what_was_compared(page: str, tmp_path: Path) -> None:
    alike, other = "under each, all arms served the same requests", "had different workloads"
    assert alike in page and other not in page
    study = study_of(tmp_path)
    assert f"Named are the largest of {len(compare(study))} differences compared" in page
    first = study.runs[0]
    study.runs[0] = replace(first, config={**first.config, "workload": {"rate": 2}})
    study.swept = "workload.rate"
    text = html.page(result_of(study), [], study)
    assert other in text and alike not in text
    assert not any("the same requests" in one.caption for one in drawings_of(study).values())


def test_every_cell_stands_in_its_own_row_and_column(page: str, tmp_path: Path) -> None:
    table = re.search(r'<table class="results">.*?</table>', page, re.DOTALL)
    assert table is not None
    found = [
        re.findall(r"<td.*?</td>", row, re.DOTALL)
        for row in re.findall(r"<tr><td>.*?</tr>", table[0], re.DOTALL)
    ]
    expected = [
        (arm, [(cell.text, cell.margin, cell.change, cell.verdict, cell.best) for cell in cells])
        for part in sections(study_of(tmp_path))
        for arm, cells in part.rows.items()
    ]
    assert len(found) == len(expected)
    for cells, (arm, values) in zip(found, expected, strict=True):
        assert cells[0] == f"<td>{arm}</td>"
        for cell, (text, margin, change, verdict, best) in zip(cells[1:], values, strict=True):
            assert f'<span class="value">{text}</span>' in cell
            assert (f"± {margin}<" in cell) == bool(margin)
            assert (f'<span class="change {verdict}">{change}</span>' in cell) == bool(change)
            assert ('class="best"' in cell) == best


def test_the_arms_differences_are_told_apart_from_what_they_share(page: str) -> None:
    differing, shared = page.split("<details>")
    assert "<th>policy.name</th><td>fcfs</td><td>urgent</td>" in differing
    assert "memory.blocks" not in differing
    assert "<th>memory.blocks</th><td>10</td>" in shared
    assert "<th>seed</th><td>0, 1, 2</td>" in shared


@pytest.mark.parametrize("arms", [("fcfs", "urgent"), ()])
def test_failures_are_on_the_page(arms: tuple[str, ...], tmp_path: Path) -> None:
    study = study_of(tmp_path, arms=arms)
    study.failed["sjf, seed 1"] = "out of <memory>"
    path = report.write(result_of(study), {}, tmp_path, study if arms else None)
    text = " ".join(Reader(path.read_text(encoding="utf-8")).texts)
    assert ("Not everything was completed." if arms else "No run was completed.") in text
    assert "sjf, seed 1" in text and ": out of <memory>" in text


@pytest.mark.parametrize(
    ("arms", "swept", "first"),
    [
        (("only",), None, "latency"),
        (("1", "8", "64"), "memory.block_size", "sweep"),
        (("x", "y"), "policy", "sweep"),
    ],
)
def test_every_kind_of_study_is_drawn(
    arms: tuple[str, ...], swept: str | None, first: str, tmp_path: Path
) -> None:
    study = study_of(tmp_path, seeds=1, arms=arms)
    study.swept = swept
    plots = drawn(drawings_of(study))
    assert plots[0].name == first
    assert "One seed" in plots[0].caption or "one seed" in plots[0].caption
    Reader(html.page(result_of(study), plots, study))


@pytest.mark.parametrize("swept", [None, "workload.rate"])
def test_runs_without_results_are_drawn(swept: str | None, tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1)
    empty = with_tables(study.runs[0], requests_of(), steps_of())
    rejected = requests_of({"state": "rejected", "first_token": NAN, "scheduled": NAN})
    none = with_tables(study.runs[1], rejected, steps_of())
    study.runs, study.swept = [empty, none], swept
    Reader(written(study).read_text(encoding="utf-8"))
    write_timeline(study, tmp_path / "timeline.json")
    report.show(result_of(study), study, Console(file=io.StringIO()))
