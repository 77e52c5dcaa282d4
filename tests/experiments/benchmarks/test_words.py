"""What a benchmark cannot work with ends in one line, for every command of the folder."""

from __future__ import annotations

import runpy
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

import experiments.benchmarks
from experiments.benchmarks import words as kinds

pytest.importorskip("torch")

FOLDER = Path(experiments.benchmarks.__file__).parent
COMMANDS = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if "__main__" in path.read_text() and not path.stem.endswith("_child")  # of another's own
)

NUMBERS = {
    kinds.at_least_one: ("a whole number of at least 1", ("0", "-1", "1.5", "nan", "few", "")),
    kinds.each_at_least_one: ("a whole number of at least 1", ("0", "-1", "8,0", "few", "")),
    kinds.at_least_zero: ("a whole number of at least 0", ("-1", "1.5", "nan", "few", "")),
    kinds.above_zero: ("a number above 0", ("0", "-1", "nan", "inf", "few", "")),
}
"""What an option takes, by its type, and what it does not."""


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


class Parsed(Exception):
    """A command has made its parser."""


def parser_of(module: str, monkeypatch: pytest.MonkeyPatch) -> ArgumentParser:
    """The parser of a command, which does not run."""

    def parse(parser: ArgumentParser, *given: Any) -> None:
        raise Parsed(parser)

    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", [module])
        patched.setattr(ArgumentParser, "parse_known_args", parse)
        with pytest.raises(Parsed) as made:
            runpy.run_module(f"experiments.benchmarks.{module}", run_name="__main__")
    parser = made.value.args[0]
    assert isinstance(parser, ArgumentParser)
    return parser


@pytest.mark.parametrize("module", [*COMMANDS, "gpu"])
def test_a_number_out_of_range_ends_in_one_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(module, monkeypatch)
    for action in parser._actions:
        assert action.type not in (int, float), action.option_strings
        allowed, bad = NUMBERS.get(action.type, ("", ()))  # type: ignore[arg-type]
        for text in bad:
            with pytest.raises(SystemExit):
                parser.parse_args([action.option_strings[0], text])
            err = capsys.readouterr().err
            assert err.count("\n") == 1
            said = f"argument {action.option_strings[0]}: {text.rpartition(',')[2]}: must be"
            assert f"{said} {allowed}" in err


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
