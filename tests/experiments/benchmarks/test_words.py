"""What a benchmark cannot work with ends in one line, for every command of the folder."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import experiments.benchmarks

pytest.importorskip("torch")

FOLDER = Path(experiments.benchmarks.__file__).parent
COMMANDS = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if "__main__" in path.read_text() and not path.stem.endswith("_child")  # of another's own
)


def complaint(
    module: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What a command says of words that it cannot work with."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"experiments.benchmarks.{module}", run_name="__main__")
    out, err = capsys.readouterr()
    assert not out
    assert ended.value.code
    return err + ("" if ended.value.code == 2 else str(ended.value.code))


def takes(module: str, word: str) -> bool:
    return f'"{word}"' in (FOLDER / f"{module}.py").read_text()


@pytest.mark.parametrize("module", COMMANDS)
def test_no_requests_end_in_an_error(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in ("0", "-3"):
        err = complaint(module, ("--requests", count), monkeypatch, capsys)
        if takes(module, "--requests"):
            line = f"argument --requests: {count}: must be a whole number of at least 1"
            assert err.count("\n") == 1
            assert line in err
        else:
            assert "--requests" in err or "arguments are required" in err


@pytest.mark.parametrize("module", [one for one in COMMANDS if takes(one, "--trace")])
def test_a_trace_that_is_not_there(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    err = complaint(module, ("--trace", "not/there.csv"), monkeypatch, capsys)
    assert err.count("\n") == 1
    assert "argument --trace: not/there.csv: there is no such file" in err
