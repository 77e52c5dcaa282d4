"""Every benchmark that has a command is run by a test: here, or in one of its own."""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")  # what some of them time

from experiments import benchmarks
from experiments.benchmarks.yardstick import timeout_seconds

COMMANDS = sorted(
    path.parent.name if path.stem == "__main__" else path.stem
    for path in Path(benchmarks.__path__[0]).rglob("*.py")
    if re.search(r"^def main\(", path.read_text(), re.MULTILINE)
)
SMALLEST = {
    "fleet": "--replicas 2 --requests 10 --routers round_robin",
    "front_door": "--rounds 1 --only study --with "
    "seeds=1 workload.requests=5 tracking=none report=false",
    "policy_runs": "--requests 5 --rounds 1 --only fcfs continuum mlfq",
    "policies": "--running 4 --waiting 8 --steps 3 --rounds 1",
    "scale": "--load calm --requests 5",
    "scheduler": "--running 2 --steps 3 --rounds 1",
    "serving": "--only sim --streams 4 --repeats 1",
    "greedy": "--requests 2 --tokens 100 --seconds 0.5",
    "soak": "--minutes 0.05",
    "simulator": "--requests 5 --rounds 1",
    "table": "",
    "tables": "--running 2 --blocks 65 --steps 3 --rounds 1",
}
"""The smallest settings of those whose numbers no other test looks at."""


@pytest.mark.parametrize("name", COMMANDS)
def test_it_is_run(name: str) -> None:
    own = Path(__file__).with_name(f"test_{name}.py")
    runs = ("main([", f'"-m", "experiments.benchmarks.{name}"')
    assert name in SMALLEST or (own.exists() and any(run in own.read_text() for run in runs)), (
        f"{name} has a main: add its smallest settings to SMALLEST, or a {own.name} that runs it"
    )


@pytest.mark.parametrize(("name", "words"), SMALLEST.items())
def test_it_ends_with_its_table(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"{benchmarks.__name__}.{name}")
    if hasattr(module, "timeout_seconds"):  # the yardstick, measured for longer than the rest
        monkeypatch.setattr(module, "timeout_seconds", partial(timeout_seconds, 10))
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    module.main()
    said = capsys.readouterr().out
    assert said.count("\n") > 0 and "nan" not in said
