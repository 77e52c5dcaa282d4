"""Every command of every benchmark at its smallest size, and bad words."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")  # used by some of them

from pagedsim.experiments import benchmarks
from pagedsim.experiments.benchmarks import harness

ROOT = Path(__file__).parents[3]
FOLDER = Path(benchmarks.__path__[0])
QUICK = "--device cpu --rounds 1"
SMALLEST = {
    "scheduler steps": "--running 2 --steps 3 --rounds 1",
    "scheduler policies": "--running 4 --waiting 8 --steps 3 --rounds 1",
    "simulator loop": "--requests 5 --rounds 1",
    "simulator offloading": "--requests 5 --rounds 1",
    "table": "",
    "kernels swap": QUICK,
    "kernels": QUICK,
    "step profile": QUICK,
}
"""The smallest settings of each command."""
SLOW = {
    "simulator scale": "--loads calm --requests 5",
    "serving rates": "--streams 4 --rounds 1",
    "serving neighbours": "--seconds 1 --only texts",
    "serving router": "--seconds 1 --rate 20 --routers round_robin",
    "engine alone": "--tokens 2 --rounds 1",
    "host": "--device cpu --running 16 --kinds greedy logprobs stream --steps 2 --rounds 1",
}
ELSEWHERE = {
    **dict.fromkeys(("compiled", "tune"), "test_tuning.py"),
    **dict.fromkeys(("gpu", "table peers", "engine", "launch", "step"), "test_gpu_hour.py"),
}
"""Commands that another test runs."""


def commands() -> set[str]:
    """The benchmarks in the tree; a command with the name of its module is its first."""
    found = set()
    for path in sorted(FOLDER.glob("*.py")):
        several = re.search(
            r"^main = main_of\(__name__, (.*)\)", path.read_text("utf-8"), re.MULTILINE
        )
        for name in several[1].split(", ") if several else ():
            found.add(path.stem if name == path.stem else f"{path.stem} {name}")
    return found


def run(line: str, *more: str) -> None:
    name, *words = re.findall(r"'.*?'|\S+", line)
    module = importlib.import_module(f"{benchmarks.__name__}.{name}")
    module.main([*(word.strip("'") for word in words), *more])


def test_every_command_of_the_tree_is_run() -> None:
    assert commands() == {*SMALLEST, *SLOW, *ELSEWHERE}, "add the smallest settings of a command"
    assert all(Path(__file__).with_name(name).exists() for name in ELSEWHERE.values())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *SMALLEST.items(),
        *(pytest.param(*one, marks=pytest.mark.slow, id=one[0]) for one in SLOW.items()),
    ],
)
def test_a_command_ends_with_its_table(
    command: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(harness, "TIMEOUTS", 10)  # they take longer than the rest
    run(f"{command} {words}", *(["--out", str(tmp_path)] if "device" in words else []))
    printed = capsys.readouterr().out
    assert printed.count("\n") > 0 and "nan" not in printed
    for path in tmp_path.glob("*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert {"device", "driver", "torch", "triton", "date", "code"} <= set(kept)
        assert str(tmp_path) not in kept["command"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("scheduler --steps 0", "argument --steps: 0: must be a whole number of at least 1"),
        ("gpu --minutes nan", "argument --minutes: nan: must be a number above 0"),
        ("simulator --trace not/there.csv", "workload.path=not/there.csv: there is no folder not"),
        ("scheduler polices", "unrecognized arguments: polices; --help lists what there is"),
    ],
)
def test_bad_words_end_in_one_line(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)
    text = str(ended.value) if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert line in text and text.strip().count("\n") == 0
