"""`cite` says what results came from, and tells whether they come out again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import pagedsim
from pagedsim.core import PagedsimError
from pagedsim.run import cite
from tests.run.studies import carried_out

WORDS = ("experiment=single", "workload.requests=20", "report=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cited") / "made"
    carried_out(made, *WORDS)
    return made


def test_it_prints_the_command_versions_digests_and_an_entry(folder: Path) -> None:
    text = cite.cite([str(folder)])
    result = folder / "result.json"
    assert f"command   {json.loads(result.read_text())['command']}" in text
    assert f"sha256    {hashlib.sha256(result.read_bytes()).hexdigest()}  result.json" in text
    (made,) = (line for line in text.splitlines() if line.startswith("made by"))
    assert made.startswith(f"made by   pagedsim {pagedsim.__version__}")
    assert "@software{pagedsim," in text and "license = {Apache-2.0}" in text


def test_licences_of_traces_are_named(tmp_path: Path) -> None:
    command = "python -m pagedsim experiment=single workload=azure_conv workload.path=a.csv"
    (tmp_path / "result.json").write_text(json.dumps({"command": command, "source": "A paper"}))
    text = cite.cite([str(tmp_path)])
    assert "data      A paper" in text and "CC-BY-4.0; cite Patel et al." in text
    assert "workload.path=a.csv: a file, not part of pagedsim" in text
    command = "python -m pagedsim experiment=sweep 'workload={path: a.csv, format: azure}'"
    (tmp_path / "result.json").write_text(json.dumps({"command": command}))
    text = cite.cite([str(tmp_path)])
    assert text.count("data      format=azure: Azure") == 1 and "CC-BY-4.0" in text


def test_a_check_tells_whether_every_byte_is_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(words: Any, into: Path) -> Path:
        assert list(words) == list(WORDS)
        into.mkdir(parents=True)
        for name in ("result.json", "comparison.csv"):
            (into / name).write_bytes((folder / name).read_bytes())
        return into

    monkeypatch.setattr(cite, "run_again", again)
    assert cite.cite([str(folder), "--check"]).endswith("came out again, byte by byte")
    changed = again(WORDS, tmp_path / "changed")
    (changed / "comparison.csv").write_text("arm\n")
    with pytest.raises(PagedsimError, match=r"comparison\.csv came out differently"):
        cite.cite([str(changed), "--check"])


@pytest.mark.slow
def test_a_run_comes_out_again(folder: Path) -> None:
    assert cite.cite([str(folder), "--check"]).endswith("came out again, byte by byte")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "takes one folder"),
        (["nowhere"], "cite nowhere: must be a folder of results"),
        (["a", "--again"], "cite --again: no such option"),
    ],
)
def test_a_bad_command(words: list[str], line: str) -> None:
    with pytest.raises(PagedsimError, match=line):
        cite.cite(words)


def test_figures_are_drawn_again_and_nothing_is_run(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "study"
    code, _, errors = call(*WORDS[:2], "seeds=2", "tracking=none", f"hydra.run.dir={place}")
    assert code == 0, errors
    drawn = sorted(path.name for path in (place / "plots").iterdir())
    monkeypatch.setattr("pagedsim.run.pool.run_job", None)  # a run would fail
    before = (place / "result.json").read_bytes()
    code, listed, errors = call("figures", str(place), "pdf")
    assert (code, errors) == (0, "")
    assert (place / "result.json").read_bytes() == before
    names = {Path(line).name for line in listed.splitlines()}
    assert names == {path.name for path in (place / "plots").iterdir()}
    pictures = [name.replace(".png", ".pdf") for name in drawn if name.endswith(".png")]
    assert pictures and {*pictures, *drawn} <= {path.name for path in (place / "plots").iterdir()}
    shutil.rmtree(next(place.glob("runs/*/seed-1")))
    assert call("figures", str(place)) == (
        1,
        "",
        "pagedsim: study: lacks 1 of 2 runs, or has them of other code; the same command with "
        "hydra.run.dir=study goes on from there\n",
    )
    shutil.rmtree(place / "runs")
    assert "its runs were not kept" in call("figures", str(place))[2]
    assert "must be a folder of results" in call("figures", str(tmp_path / "nowhere"))[2]
    assert "FORMAT" in call("figures")[1]
