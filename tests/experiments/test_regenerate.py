"""The committed findings are what their commands give."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import regenerate
from experiments.regenerate import RESULTS, STUDIES, index, keep, run, there
from pagedsim.metrics.files import RESULT
from pagedsim.run.help import experiments
from tests.experiments.leaves import check_leaves

QUICK = ("fcfs_vs_priority",)
"""Studies that take a few seconds."""


def test_the_index_is_of_what_is_there() -> None:
    assert (RESULTS / "README.md").read_text() == index(there())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in STUDIES
        if name in there()
    ],
)
def test_a_result_comes_out_again(name: str, tmp_path: Path) -> None:
    made = run(name, tmp_path / "run")
    (kind,) = (one for one in experiments() if one.name == name)
    check_leaves(made, kind)
    keep(made, tmp_path / "again")
    assert (tmp_path / "again" / RESULT).read_text() == (RESULTS / name / RESULT).read_text()
    pictures = {path.name for path in (RESULTS / name).glob("*.png")}
    assert {path.name for path in (tmp_path / "again").glob("*.png")} == pictures


def test_an_unknown_study(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        regenerate.main(["paper_fig99"])
    assert "paper_fig99: must be one of paper_fig2, " in capsys.readouterr().err
