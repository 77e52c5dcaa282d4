"""A result: numbers beside those that were published, on the terminal, as a file and as a page."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from pagedsim import report
from pagedsim.fidelity.regime_report import (
    JUDGED,
    KEYS,
    SHOWN,
    Regime,
    data,
    doubts,
    finding,
    table,
)
from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.files import RESULT, write_json
from pagedsim.metrics.result import Listing, Published, Result, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import signed
from pagedsim.report.style import margins, new_figure
from tests.metrics.tables import run_of
from tests.report.test_page import Reader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULT_OF_TWO = Result(
    name="paper_fig0",
    title="Where <memory> goes",
    question="How much & why?",
    command="python -m pagedsim experiment=paper_fig0 'study.sizes=[1,<2>]'",
    finding=["Much of it is free.", "Some <is> not."],
    rows=[
        Row("stored", 20.123456, 25.0, "%", why="prompts <b> answers"),
        Row("ratio", 3.0, (2.7, 8), "×"),
        Row("too much", 9.0, (2.7, 8), "×"),
        Row("ours alone", 1234567.0),
    ],
    listings=[Listing("More", ["", "of it"], [["first", "1 <b>"], ["second", "2"]])],
    source="An Author, 2023",
    notes=["step times are <fitted>"],
    failed={"size <2>": "out of memory & gone"},
    again={"The same on <another>": "python -m pagedsim 'model=<b>'"},
    data={"curve": {1: [0.1, 1 / 3], "two": (2, None)}, "none": math.nan, "many": 123456789},
)


@pytest.mark.parametrize(
    ("ours", "published", "difference"),
    [
        (11.0, 10.0, 0.1),
        (8.0, (2.7, 8), 0.0),
        (10.0, (2, 8), 0.25),
        (1.0, (None, 8), 0.0),
        (10.0, (None, 8), 0.25),
        (9.0, (4, None), 0.0),
        (3.0, (4, None), -0.25),
        (0.0, 0.0, 0.0),
        (1.0, None, math.nan),
    ],
)
def test_the_difference_is_to_the_nearest_that_was_published(
    ours: float, published: Published, difference: float
) -> None:
    assert Row("x", ours, published).difference == pytest.approx(difference, nan_ok=True)


def test_the_record_has_every_number_and_word() -> None:
    record = RESULT_OF_TWO.record()
    assert record["experiment"] == "paper_fig0"
    assert record["finding"] == ["Much of it is free.", "Some <is> not."]
    assert record["rows"][0] == {
        "what": "stored",
        "ours": 20.1235,  # six digits
        "published": 25.0,
        "difference": pytest.approx(-0.195062),
        "unit": "%",
        "why": "prompts <b> answers",
    }
    assert record["rows"][1]["published"] == [2.7, 8]
    assert record["rows"][3]["ours"] == 1234570.0
    assert record["notes"] == ["step times are <fitted>"]
    assert record["command"] == RESULT_OF_TWO.command
    assert record["pictures"] == []
    assert RESULT_OF_TWO.record(["line", "bars"])["pictures"] == ["line", "bars"]
    assert record["failed"] == dict(RESULT_OF_TWO.failed)
    assert "failed" not in replace(RESULT_OF_TWO, failed={}).record()
    assert "pagedsim" not in record
    assert replace(RESULT_OF_TWO, made_by={"version": "1"}).record()["pagedsim"] == {"version": "1"}
    # Data is rounded however deep, and its keys are texts.
    data = record["data"]
    assert data["curve"] == {"1": [0.1, 0.333333], "two": [2, None]}
    assert data["many"] == 123456789  # a count is no measurement
    assert math.isnan(data["none"])
    data["curve"]["1"].append(9)
    assert RESULT_OF_TWO.data["curve"][1] == [0.1, 1 / 3]


# -- the terminal ----------------------------------------------------------------------------------


def printed(result: Result, width: int = 200) -> str:
    out = io.StringIO()
    report.show(result, console=Console(file=out, width=width))
    return out.getvalue()


def cells(text: str, first: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(first + " ")]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_what_was_published_stands_beside_ours() -> None:
    text = printed(RESULT_OF_TWO)
    assert "Published and ours" in text
    assert cells(text, "stored") == ["stored", "25 %", "20.1 %", "−19.5 %"]
    assert cells(text, "ratio") == ["ratio", "2.7 to 8 ×", "3 ×", "within"]
    assert cells(text, "too much") == ["too much", "2.7 to 8 ×", "9 ×", "+12.5 %"]
    assert cells(text, "ours alone") == ["ours alone", "–", "1,234,567", "–"]
    bounds = [
        Row("most", 3.0, (None, 8), "×"),
        Row("least", 3.0, (2, None), "×"),
        Row("largest", 3.0, 4.0, "×", up_to=True),
    ]
    bounded = printed(replace(RESULT_OF_TWO, rows=bounds))
    assert cells(bounded, "most") == ["most", "up to 8 ×", "3 ×", "within"]
    assert cells(bounded, "least") == ["least", "at least 2 ×", "3 ×", "within"]
    assert cells(bounded, "largest") == ["largest", "up to 4 ×", "3 ×", "−25.0 %"]
    assert [row.record().get("up_to") for row in bounds] == [None, None, True]
    for what, why in RESULT_OF_TWO.failed.items():
        assert f"missing: {what}: {why}" in text
    assert "stored: prompts <b> answers" in text
    assert "note: step times are <fitted>" in text
    text = printed(replace(RESULT_OF_TWO, rows=[Row("knee", math.nan, 2.0, "/s")]))
    assert cells(text, "knee") == ["knee", "2 /s", "–", "–"]
    text = printed(replace(RESULT_OF_TWO, rows=[Row("rate", 0.00012345, unit="/s")], source=""))
    assert "Results" in text and "published" not in text.lower()
    assert cells(text, "rate") == ["rate", "0.000123 /s"]


def test_a_brief_result_names_what_is_in_the_report() -> None:
    text = printed(replace(RESULT_OF_TWO, brief=True))
    assert cells(text, "stored") and "ours alone" not in text and "first" not in text
    assert "stored: prompts" not in text and "Some <is> not." in text
    assert "In the report: 1 more row, reasons for differences, “More” (2 rows)." in text
    assert "note: step times are <fitted>" in text and "missing: size <2>" in text
    many = [Row(f"row {number}", 1.0) for number in range(40)]
    text = printed(replace(RESULT_OF_TWO, brief=True, rows=many, listings=[]))
    assert text.count("row ") == 12 and "In the report: 28 more rows." in text
    long = replace(RESULT_OF_TWO, brief=True, rows=many, finding=["A finding."] * 60)
    assert printed(long).count("row ") == 4
    text = printed(replace(RESULT_OF_TWO, brief=True, rows=many[:2], listings=[]))
    assert "In the report" not in text


WIDE = Listing(
    "What [all] of them reach, and how far that is from what they say",
    ["", "requests/s", "output tokens/s", "against [fcfs]", "binds"],
    [
        ["fcfs", "12.3 ± 0.4", "12,345", "", "TTFT P99 (2 of 3)"],
        [
            "a policy that goes by the name of a whole sentence",
            *("9.81 ± 0.2", "9,870", "(−3.4 %)"),
            "no rate meets it: at 0.1/s it misses TTFT P99 and TPOT P99",
        ],
    ],
    note="[Means] over all seeds.",
)


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_cuts_no_number_of_a_table(width: int) -> None:
    text = printed(replace(RESULT_OF_TWO, finding=[], listings=[WIDE], notes=[]), width)
    assert {*WIDE.title.split(), *WIDE.note.split()} <= set(text.split())
    assert "…" not in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for row in WIDE.rows:
        assert all(cell in text for cell in row[1:4])
    assert set(WIDE.rows[1][0].split()) <= set(text.split())
    beside = [line for line in lines if any(row[1] in line for row in WIDE.rows)]
    assert [line.split()[0] for line in beside] == ["fcfs", "a"]  # every number has its name


# -- files -----------------------------------------------------------------------------------------


def drawn() -> Figure:
    figure = new_figure(2.0)
    figure.subplots().plot([0, 1], [0, 1], color="#0072b2")
    margins(figure)
    return figure


def written(folder: Path, result: Result = RESULT_OF_TWO) -> str:
    folder.mkdir(exist_ok=True)
    write_json(folder / RESULT, result.record(["line"]))
    line = FigureSpec("A <line>", "It rises & rises.", drawn)
    path = report.write(result, {"line": line}, folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def test_the_file_is_json_that_every_reader_takes(tmp_path: Path) -> None:
    written(tmp_path)

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (tmp_path / RESULT).read_text(encoding="utf-8")
    found = json.loads(text, parse_constant=refused)
    assert found["data"]["none"] is None
    assert found["rows"][3]["difference"] is None
    assert found["command"] == RESULT_OF_TWO.command


def test_the_page_is_whole_and_has_everything(tmp_path: Path) -> None:
    page = written(tmp_path)
    reader = Reader(page)  # every tag is closed
    text = " ".join(" ".join(reader.texts).split())
    for word in (
        "Not everything was completed.",
        "size <2> : out of memory & gone",
        "The same on <another>:",
        "python -m pagedsim 'model=<b>'",
        "Where <memory> goes",
        "How much & why?",
        "Much of it is free.",
        "−19.5 %",
        "2.7 to 8 ×",
        "within",
        "stored: prompts <b> answers",
        "1 <b>",
        "A <line>",
        "It rises & rises.",
        "Note: step times are <fitted>.",
        "Published: An Author, 2023",
        "'study.sizes=[1,<2>]'",
    ):
        assert word in text
    assert not {tag for tag, _ in reader.tags} & {"link", "img", "iframe", "memory", "b"}
    assert "#0072b2" not in page.split("</style>")[1]  # colours follow the reader's mode


# -- what a validation tells: the simulator beside the engine, in words, tables and a picture ------


@pytest.fixture
def regimes(tmp_path: Path) -> list[Regime]:
    """The engine has served twice what the simulator has served once, a little faster."""
    engine = [run_of("engine", seed, tmp_path) for seed in (0, 1)]
    simulator = run_of("simulator", 0, tmp_path, slower=1.3)
    return [
        Regime(
            name=name,
            load=0.7,
            rate=2.0,
            tolerance=0.05,
            engine=[run.summary for run in engine],
            simulator=simulator.summary,
            pace=[0.01, -0.02],
            paced=[simulator.summary] * 2,
            engine_requests=[run.requests() for run in engine],
            simulator_requests=simulator.requests(),
        )
        for name in ("half load", "overload")
    ]


MACHINE = {
    **{"device": "a CPU", "model": "tiny", "dtype": "float32", "blocks": 8},
    "block_size": 16,
}


def test_every_load_has_its_verdicts_and_errors(regimes: list[Regime]) -> None:
    first, second, machine = finding(regimes, MACHINE, 1234)
    regime = regimes[0]
    found, verdicts = regime.agreements, regime.verdicts
    assert first.startswith("half load: ") and second.startswith("overload: ")
    for key in JUDGED:
        assert f"{label_of(key)} {signed(found[key].error)}, {verdicts[key]}" in first
    assert "a CPU, tiny, float32, 8 blocks of 16 tokens" in machine
    assert "1,234 steps" in machine


def test_rows_and_data_have_every_metric(regimes: list[Regime]) -> None:
    rows = table(regimes)
    assert [(row["load"], row["metric"]) for row in rows] == [
        (name, key) for name in ("half load", "overload") for key in KEYS
    ]
    for regime in regimes:
        told = data(regime)
        assert json.dumps(told)  # nothing but plain values
        assert (told["runs"], told["requests"], told["pace"]) == (2, 40, [0.01, -0.02])
        assert set(told["metrics"]) == set(KEYS) and set(told["by_request"]) == set(SHOWN)
        for key, found in regime.agreements.items():
            assert told["metrics"][key] == found._asdict()
            (row,) = (r for r in rows if (r["load"], r["metric"]) == (regime.name, key))
            assert row["verdict"] == regime.verdicts.get(key, "")
            assert row["simulator"] == found.simulator


def test_an_engine_whose_runs_differ_much_is_doubted(regimes: list[Regime]) -> None:
    runs = [
        {**summary, "ttft_mean": ttft, "preemptions": 0}
        for summary, ttft in zip(regimes[0].engine, (1.0, 3.0), strict=True)
    ]
    regime = replace(regimes[0], engine=runs)
    spreads = [regime.agreements[key].spread for key in ("ttft_mean", "preemptions")]
    assert spreads == pytest.approx([0.5**0.5, 0])
    small, uneven = doubts([regime])
    assert small.startswith("no request was preempted under half load")
    assert "TTFT mean of its runs differs by ± 71 %" in uneven
