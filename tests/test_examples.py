"""The gallery of scripts: each runs, prints something, and stands in its index."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_says_what_it_shows_and_how_to_run_it(script: Path) -> None:
    said = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert said and f"python docs/examples/{script.name}" in said


def test_the_index_has_them_all() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [script.name for script in SCRIPTS if f"]({script.name})" not in index] == []
