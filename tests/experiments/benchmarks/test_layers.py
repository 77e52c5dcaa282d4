"""What a sample of a stack counts for, and that a command can be sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.benchmarks.layers import (
    LAYERS,
    MAKE_TABLES,
    PLACES,
    SIMPY,
    TREE,
    Place,
    layer_of,
    main,
    place,
    stacks,
)
from pagedsim.metrics.recorder import Numbers, Recorder, Words

CORE = f"{TREE}pagedsim/core/scheduler.py"
NUMPY = "/usr/lib/numpy/core.py"


def test_places_are_there() -> None:
    assert set(PLACES.values()) | {"SimPy", "tables", "imports"} == set(LAYERS)
    for name in PLACES:
        assert Path(TREE, name).exists(), name
    for name in MAKE_TABLES:
        assert any(hasattr(kind, name) for kind in (Recorder, Numbers, Words)), name


def test_stacks_are_read() -> None:
    lines = [
        "Stack (most recent call first):",
        '  File "/a b/c.py", line 12 in inner',
        '  File "d.py", line 3 in <listcomp>',
        "Stack (most recent call first):",
        '  File "d.py", line 4 in outer',
    ]
    first, second = stacks(lines)
    assert first == [("/a b/c.py", "inner"), ("d.py", "<listcomp>")]
    assert second == [("d.py", "outer")]


@pytest.mark.parametrize(
    ("stack", "layer", "function"),
    [
        ([(CORE, "plan")], "scheduler", "pagedsim/core/scheduler.py: plan"),
        ([(NUMPY, "sum"), (CORE, "plan")], "scheduler", "pagedsim/core/scheduler.py: plan"),
        ([(CORE, "<listcomp>"), (CORE, "tell")], "scheduler", "pagedsim/core/scheduler.py: tell"),
        ([(f"{SIMPY}core.py", "step"), (CORE, "plan")], "SimPy", "step"),
        ([(CORE, "<module>"), ("<frozen importlib._bootstrap>", "_load")], "imports",
         "pagedsim/core/scheduler.py"),
        ([(NUMPY, "sum")], "command", "before and after"),
        ([(f"{TREE}.venv/lib/python/site-packages/numpy/core.py", "sum"), (CORE, "plan")],
         "scheduler", "pagedsim/core/scheduler.py: plan"),
    ],
)  # fmt: skip
def test_a_sample_counts_once(stack: list[tuple[str, str]], layer: str, function: str) -> None:
    assert place(stack) == Place(layer, function)


@pytest.mark.parametrize(
    ("file", "function", "layer"),
    [
        ("pagedsim/sim/server.py", "_serve", "driver"),
        ("pagedsim/sim/feed.py", "take", "driver"),
        ("pagedsim/sim/cost/terms.py", "decode_seconds", "cost"),
        ("pagedsim/sim/cost/work.py", "total_work", "summary"),
        ("pagedsim/metrics/recorder.py", "step", "recorder"),
        ("pagedsim/metrics/recorder.py", "requests_table", "tables"),
        ("policies/ordering.py", "rank", "policy"),
        ("pagedsim/run/pool.py", "_here", "command"),
    ],
)
def test_layers_of_functions(file: str, function: str, layer: str) -> None:
    assert layer_of(file, function) == layer


@pytest.mark.slow
def test_a_command_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    main([*("--only", "short requests", "--requests", "300", "--rounds", "1", "--functions", "2")])
    said = capsys.readouterr().out.splitlines()
    assert said[2].startswith("| short requests | 300 | ")
    rows = {
        line.split(" | ")[0]: line.split(" | ")[1]
        for line in said
        if line.startswith("| ") and " ± " in line
    }
    assert float(rows["| imports"].split()[0]) > 0 and "| scheduler" in rows
    assert "short requests, imports: timeouts a request" in said
