"""Figures and tables for a paper: widths, fonts, numbers, LaTeX."""

from __future__ import annotations

import csv
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.report import write
from pagedsim.report.figures import check_formats
from pagedsim.report.plots import drawings_of
from pagedsim.report.print import csv_of, draw_print, latex_of
from pagedsim.report.style import drawing
from tests.metrics.tables import result_of, study_of, ttft


@pytest.mark.parametrize("width", [1.5, 3.3, 7.0])
def test_a_figure_of_lines_is_as_wide_as_asked_and_has_every_line(
    tmp_path: Path, width: float
) -> None:
    study = study_of(tmp_path)
    data = drawings_of(study)["latency"].data
    assert data is not None
    with drawing():
        figure = draw_print(data(), study.arms, False, width)
        figure.savefig(tmp_path / "figure.pdf")
    assert figure.get_size_inches()[0] == width
    assert [text.get_text() for text in figure.legends[0].texts] == study.arms
    lines = figure.axes[0].get_lines()
    assert len({line.get_linestyle() for line in lines}) == len(study.arms)
    pdf = (tmp_path / "figure.pdf").read_bytes()
    assert (b"/Type3" not in pdf and b"/TrueType" in pdf) or b"/CIDFontType2" in pdf


@pytest.mark.parametrize("width", [0, 1, 40])
def test_a_width_that_no_paper_has_is_refused(tmp_path: Path, width: float) -> None:
    data = drawings_of(study_of(tmp_path))["load"].data
    assert data is not None
    with pytest.raises(ConfigError, match=f"width={width}: must be 1.5 to 13"):
        draw_print(data(), [], False, width)


def test_the_numbers_of_a_figure_are_those_of_its_lines(tmp_path: Path) -> None:
    data = drawings_of(study_of(tmp_path))["latency"].data
    assert data is not None
    rows = list(csv.DictReader(StringIO(csv_of(data()))))
    for panel in data().panels:
        for line in panel.series:
            mine = [
                row
                for row in rows
                if (row["panel"], row["arm"], row["client"])
                == (panel.title, line.arm or "", line.client or "")
            ]
            assert np.array_equal([float(row["x"]) for row in mine], line.x)
            assert np.array_equal([float(row["y"]) for row in mine], line.y)
            assert {row["x_axis"] for row in mine} == {panel.x.text}


def test_formats_and_files(tmp_path: Path) -> None:
    study = study_of(tmp_path / "runs")
    for again in range(2):
        place = tmp_path / str(again)
        write(result_of(study), drawings_of(study), place, study, formats=["png", "pdf", "svg"])
    first, second = (sorted((tmp_path / str(again)).rglob("*.*")) for again in range(2))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    names = {file.name for file in first}
    assert {"table.tex", "latency.csv", "latency.pdf", "latency.svg", "latency.png"} <= names
    assert "effect.csv" not in names  # it has no lines
    with pytest.raises(ConfigError, match="figures: eps: must be of png, pdf, svg"):
        check_formats(["png", "eps"])


def test_a_table_in_latex_has_every_cell_and_no_bare_sign(tmp_path: Path) -> None:
    study = study_of(tmp_path, arms=("fcfs_100%", "a&b"))
    text, note = latex_of(study).rstrip("\n").rsplit("\n", 1)
    assert text.startswith(r"\begin{tabular}{lrrrrr}") and text.endswith(r"\end{tabular}")
    assert note == (
        "% Geometric means over 3 seeds; changes: against fcfs_100%, "
        "in brackets where not sure (95 %)"
    )
    assert r"fcfs\_100\%" in text and r"a\&b" in text
    rows = [
        line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line
    ]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {5}
    assert not re.search(r"(?<!\\)[%#_]", text.replace(r"\begin", ""))
    assert r"\textbf{" in latex_of(ttft({"a": [1.0, 1.1], "b": [2.0, 2.3]}))
    assert r"{\footnotesize $\times$2.0}" in latex_of(ttft({"a": [1.0, 1.1], "b": [2.0, 2.2]}))
    assert r"{\footnotesize (+4.4 \%)}" in latex_of(ttft({"a": [1.0, 1.1], "b": [1.2, 1.0]}))
