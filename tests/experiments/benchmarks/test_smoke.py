"""Every command of every benchmark runs at its smallest size, and refuses bad words in one line."""

from __future__ import annotations

import importlib
import json
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # used by some of them

from experiments import benchmarks
from experiments.benchmarks import harness

FOLDER = Path(benchmarks.__path__[0])
QUICK = "--device cpu --quick --rounds 1 --resume"
SMALLEST = {
    "scheduler steps": "--running 2 --steps 3 --rounds 1",
    "scheduler policies": "--running 4 --waiting 8 --steps 3 --rounds 1",
    "scheduler policy_runs": "--requests 5 --rounds 1 --only fcfs continuum mlfq",
    "simulator loop": "--requests 5 --rounds 1",
    "simulator scale": "--load calm --requests 5",
    "simulator fleet": "--replicas 2 --requests 10 --routers round_robin",
    "layers commands": "--rounds 1 --only study --with "
    "seeds=1 workload.requests=5 tracking=none report=false",
    "serving rates": "--only sim --streams 4 --repeats 1",
    "serving soak": "--minutes 0.05",
    "serving greedy": "--requests 2 --tokens 100 --seconds 0.5",
    "table": "",
    "host step": "--running 1 3 --steps 4 --rounds 2",
    "engine engine": "--prompts 5 --tokens 6 --repeats 1",
    "servers": "--device cpu --prompts 3 --tokens 4 --repeats 1",
    "kernels": QUICK,
    "swap": QUICK,
    "products products": QUICK,
    "products experts": QUICK,
    "profile": QUICK,
}
"""The smallest settings of each command."""
ELSEWHERE = {
    "simulator vidur": "test_vidur.py",
    "layers layers": "test_layers.py",
    "clients": "test_clients.py",
    "compiled kernels": "test_compiled.py",
    "compiled sampling": "test_compiled.py",
    "engine cpu": "test_smoke.py",
    "gpu": "test_all.py",
    "host tables": "test_smoke.py",
    "step": "test_wrong.py",
    "tune attention": "test_tune.py",
    "tune products": "test_tune.py",
}
"""Commands that another test runs."""
NUMBERS = {
    harness.positive_int: ("a whole number of at least 1", ("0", "-1", "1.5", "nan", "few", "")),
    harness.positive_ints: ("a whole number of at least 1", ("0", "-1", "8,0", "few", "")),
    harness.non_negative_int: ("a whole number of at least 0", ("-1", "1.5", "nan", "few", "")),
    harness.positive_float: ("a number above 0", ("0", "-1", "nan", "inf", "few", "")),
}
"""What an option accepts, by its type, and words that it refuses."""


def commands() -> list[str]:
    """The benchmarks in the tree: modules with a `main`, by command where there are several."""
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^def main\(", text, re.MULTILINE):
            name = path.parent.name if path.stem == "__main__" else path.stem
            several = re.search(r"^COMMANDS = \{(.*?)\}", text, re.MULTILINE | re.DOTALL)
            names = re.findall(r'"(\w+)":', several[1]) if several else []
            found += [f"{name} {one}" for one in names] or [name]
    return found


def run(line: str, *more: str) -> None:
    name, *words = line.split()
    module = importlib.import_module(f"{benchmarks.__name__}.{name}")
    if name == "gpu":
        module = importlib.import_module(f"{benchmarks.__name__}.gpu.__main__")
    module.main([*words, *more])


def test_every_command_is_run() -> None:
    assert set(commands()) == {*SMALLEST, *ELSEWHERE}, "add the smallest settings of a new command"
    for name in ELSEWHERE.values():
        assert Path(__file__).with_name(name).exists()


@pytest.mark.parametrize(("command", "words"), SMALLEST.items())
def test_it_ends_with_its_table(
    command: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(harness, "TIMEOUTS", 10)  # they take longer than the rest
    out = ["--out", str(tmp_path)] if "device" in words or command.startswith("host") else []
    run(f"{command} {words}", *out)
    printed = capsys.readouterr().out
    assert printed.count("\n") > 0 and "nan" not in printed
    for path in tmp_path.glob("*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert {"device", "driver", "torch", "triton", "date", "code", "tiles"} <= set(kept)
        assert str(tmp_path) not in kept["command"]
    if words == QUICK and command != "profile":  # nothing is measured again
        (path,) = tmp_path.glob("*.json")
        run(f"{command} {words}", *out)
        assert json.loads(path.read_text(encoding="utf-8")) == kept


def test_one_long_context_adds_no_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    run("host tables --running 1 3 --blocks 400 --steps 32 --rounds 1")
    _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split(" | ")[1:3] == ["blocks of a long one", "bytes a step"]
    sent = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows]
    assert [one[:2] for one in sent] == [["1", "–"], ["1", "400"], ["3", "–"], ["3", "400"]]
    assert sent[0][2] == sent[1][2] and sent[2][2] == sent[3][2]


@pytest.mark.slow
def test_every_form_of_weights_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    run("engine cpu --model tiny --batches 1,2 --rounds 1")
    printed = capsys.readouterr().out
    for form in ("float32", "bfloat16", "int8"):
        assert f"tiny, {form}, threads=1" in printed
    assert len(re.findall(r"^\| \d \| ", printed, re.MULTILINE)) == 2 * 3 * 2 + 2
    assert printed.count("A step of one request takes ") == 3


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--forms int4", "--forms=int4: must be of float32, bfloat16, int8"),
        ("--model none.gguf --forms float32", "model=none.gguf: no such file"),
    ],
)
def test_settings_of_a_model_that_are_wrong_end_in_one_line(words: str, line: str) -> None:
    with pytest.raises(SystemExit, match=f"^{re.escape(line)}$"):
        run(f"engine cpu {words}")


class Parsed(Exception):
    """A command has made its parser."""


def parser_of(command: str, monkeypatch: pytest.MonkeyPatch) -> ArgumentParser:
    """The parser of a command, which does not run."""

    def parse(parser: ArgumentParser, *given: Any) -> None:
        raise Parsed(parser)

    with monkeypatch.context() as patched, pytest.raises(Parsed) as made:
        patched.setattr(ArgumentParser, "parse_known_args", parse)
        run(command)
    parser = made.value.args[0]
    assert isinstance(parser, harness.Parser)
    return parser


@pytest.mark.parametrize("command", commands())
def test_bad_words_end_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(command, monkeypatch)
    for action in parser._actions:
        assert action.type not in (int, float), action.option_strings
        allowed, bad = NUMBERS.get(action.type, ("", ()))  # type: ignore[arg-type]
        if action.type is harness.existing_file:
            allowed, bad = "there is no such file", ("not/there.csv",)
        for text in bad:
            with pytest.raises(SystemExit) as ended:
                parser.parse_args([action.option_strings[0], text])
            assert ended.value.code == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            assert f"argument {action.option_strings[0]}: {text.rpartition(',')[2]}: " in error
            assert allowed in error


def test_an_unknown_word_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("scheduler polices")
    assert capsys.readouterr().err.count("\n") == 1


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("simulator --help")
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert all(f"simulator {name}" in printed for name in ("scale", "fleet", "vidur"))
