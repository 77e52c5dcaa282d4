"""The page as a reader's browser gets it: whole, on its own, and with every number in it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from pagedsim import report
from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import compare
from pagedsim.report import html
from pagedsim.report.figures import drawn
from pagedsim.report.load import load_of, mean_by_replica
from pagedsim.report.plots import drawings_of
from pagedsim.report.replicas import MOST, replica_listings
from pagedsim.report.style import drawing
from pagedsim.report.table import sections
from pagedsim.report.timeline import REPLICAS, write_timeline
from tests.metrics.tables import (
    NAN,
    fleet_run,
    fleet_study,
    requests_of,
    result_of,
    steps_of,
    study_of,
    with_tables,
)

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
    assert not {tag for tag, _ in tags} & {"link", "img", "iframe", "object", "image"}
    for _, attributes in tags:
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    shown = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "@import" not in page and not re.search(r"https?://", shown)
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
        for row in re.findall(r"<tr data-arm=.*?</tr>", table[0], re.DOTALL)
    ]
    expected = [
        (arm, [(c.text, c.margin, c.change, c.verdict, c.best) for c in row.values()])
        for part in sections(study_of(tmp_path))
        for arm, row in part.rows.items()
    ]
    assert len(found) == len(expected)
    for cells, (arm, values) in zip(found, expected, strict=True):
        assert cells[0] == f"<td>{arm}</td>"
        for cell, (text, margin, change, verdict, best) in zip(cells[1:], values, strict=True):
            assert f'<span class="value">{text}</span>' in cell
            assert (f'class="margin">{margin}<' in cell) == bool(margin)
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


# -- pages, terminal output, timelines and plots of a fleet ----------------------------------------


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with drawing():
        yield


def test_load_is_summed_over_replicas_or_each_one_s_own(tmp_path: Path) -> None:
    run = fleet_study(tmp_path).runs[0]
    edges, series = load_of(run, 4)
    assert edges.tolist() == [0, 1, 2, 3, 4]
    assert series["running"].tolist() == [2, 2, 1, 2]
    assert series["waiting"].tolist() == [0, 0, 1, 0]
    assert series["kv"] == pytest.approx([100 * used / 30 for used in (4, 5, 3, 6)])
    _, values = mean_by_replica(run, 4)
    assert values.tolist() == [[2, 1, 0, 0], [0, 1, 2, 2]]


def test_a_row_a_replica(tmp_path: Path) -> None:
    study = fleet_study(tmp_path)
    even, sticky = replica_listings(study)
    assert (even.title, sticky.title) == ("Replicas of even", "Replicas of sticky")
    assert [row[:6] for row in even.rows] == [
        ["fast-0", "fast", "H100", "2", "110 %", "50.0 %"],
        ["slow-0", "slow", "A100", "2", "89.7 %", "75.0 %"],
    ]
    study.runs = study.runs[:1]
    assert [one.title for one in replica_listings(study)] == ["Replicas"]
    (listing,) = replica_listings(fleet_study(tmp_path, arms=list("abcde")))
    assert [row[:4] for row in listing.rows][:1] == [["a", "2", "2", "89.7 to 110 %"]]
    assert len(listing.rows) == 5


def test_many_replicas_are_told_by_quartiles_and_extremes(tmp_path: Path) -> None:
    study = fleet_study(tmp_path, MOST + 1, ["one"])
    (listing,) = replica_listings(study)
    names = [row[0] for row in listing.rows]
    assert names[:5] == ["most", "P75", "median", "P25", "least"]
    assert names[5:] == [f"replica-{n}" for n in (15, 14, 13, 1, 0, 16)]
    requests = [row[1] for row in listing.rows]
    assert requests == ["16", "12", "8", "4", "0", "16", "15", "14", "2", "1", "0"]
    assert "Of 17 replicas there are" in listing.note
    few = fleet_study(tmp_path / "few", MOST, ["one"])
    assert len(replica_listings(few)[0].rows) == MOST


def test_one_server_has_no_such_tables_and_pictures(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1)
    assert replica_listings(study) == []
    assert "balance" not in drawings_of(study)


def events_of(study: Arms, **caps: int) -> tuple[list[dict[str, Any]], str]:
    page = json.loads(write_timeline(study, study.folder / "timeline.json", **caps).read_text())
    return page["traceEvents"], page["otherData"]["note"]


def test_each_replica_is_a_process_of_the_timeline(tmp_path: Path) -> None:
    events, note = events_of(fleet_study(tmp_path))
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"{arm}: {one}" for arm in ("even", "sticky") for one in ("fast-0", "slow-0")]
    assert not note
    slices = {
        pid: [(e["tid"], e["name"], e["ts"]) for e in events if e["ph"] == "X" and e["pid"] == pid]
        for pid in (1, 2)
    }
    assert slices[1][:2] == [(1, "prefill", 0), (1, "decode", 1e6)]
    assert slices[2][:3] == [(1, "prefill", 1e6), (1, "decode", 2e6), (1, "decode", 3e6)]
    assert {tid for tid, *_ in slices[1]} == {1, 2, 3}
    use = [e["args"]["value"] for e in events if e["ph"] == "C" and e["name"] == "KV use (%)"]
    assert use[:5] == [40, 20, 15, 15, 30]


def test_a_timeline_of_many_replicas_is_bounded(tmp_path: Path) -> None:
    study = fleet_study(tmp_path, 40, ["one"])
    events, note = events_of(study, requests=160, steps=320)
    assert f"one: the first {REPLICAS} of 40 replicas are shown" in note
    assert "one: replica-15: the first 10 of 16 requests are shown" in note
    assert "one: replica-15: the first 20 of 32 steps are shown" in note
    shown = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len({pid for pid, _ in shown}) == REPLICAS
    assert len([1 for _, tid in shown if tid > 1]) <= 160


def test_requests_that_move_and_that_are_refused_are_on_the_timeline(tmp_path: Path) -> None:
    moved = {"replica": 1, "first_token": 1.0, "finished": 4.0, "output_tokens": 3}
    stayed = {"replica": 0, "first_token": 1.0, "finished": 2.0, "output_tokens": 2}
    refused = {"replica": -1, "state": "rejected", "first_token": NAN, "finished": 0.5}
    requests = requests_of(moved, stayed, refused)
    for name, value in (("came_from", 0), ("left", 1.5), ("boarded", 2.0)):
        requests = requests.append_column(name, pa.array([value, None, None]))
    run = fleet_run(Run("one", 0, tmp_path, {}, {}), requests)
    events, _ = events_of(Arms("s", "t", "q", tmp_path, "c", [run]))
    told = [
        (e["pid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if e["ph"] == "X" and "request" in e["args"]
    ]
    assert told == [
        (1, "prefill", 0, 1),
        (1, "decode", 1, 1),
        (2, "prefill", 0, 1),
        (2, "decode", 1, 0.5),
        (2, "on the way", 1.5, 0.5),
        (2, "decode", 2, 2),
        (3, "rejected", 0, 0.5),
    ]
    assert [e["args"].get("came_from") for e in events if e["name"] == "on the way"] == ["fast-0"]
