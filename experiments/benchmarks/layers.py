"""Where the time of commands goes.

    python -m pagedsim.experiments.benchmarks.layers [--trace FILE.csv] [--functions 5]
    python -m pagedsim.experiments.benchmarks.layers commands [--rounds 5]

The first runs `python -m pagedsim experiment=single` twice a round, for its processor time and with
its stack sampled every few milliseconds. A sample counts for the innermost frame of our code or
SimPy, so that a library counts for its caller, and an import for imports. A layer's share of the
samples, times the cost of the command without the sampler, is its cost, in timeouts a request and a
step. Compiled code has no frames: its time counts for its caller in Python.

`commands` measures whole commands, with all their processes, in an empty folder and with compiled
modules in place; of the rounds the one with the fewest timeouts counts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import simpy
from pyarrow import parquet

from pagedsim.experiments.benchmarks.harness import (
    ROOT,
    Cost,
    children_cpu_seconds,
    main_of,
    parse,
    table,
)
from pagedsim.experiments.benchmarks.simulator import (
    AHEAD,
    DISPLACING,
    SERVER,
    TRACE,
    conversation,
    sessions,
    short,
)

# -- layers ----------------------------------------------------------------------------------------

INTERVAL = 0.003
"""Seconds between two samples."""
TREE = f"{ROOT}/"
SIMPY = str(Path(simpy.__file__).parent) + "/"
COUNTED = (SIMPY, *(f"{TREE}{folder}/" for folder in ("pagedsim", "policies", "experiments")))
"""Folders whose frames count; an environment of libraries may lie in the tree."""
LOOP = ("scheduler", "policy", "driver", "cost", "recorder", "SimPy", "workload")
"""Layers that work while simulated time passes."""
LAYERS = (*LOOP, "tables", "summary", "plots", "imports", "command")
_DRIVER = ("beams", "environment", "feed", "server", "simulate", "tiers")
PLACES: Mapping[str, str] = {
    "pagedsim/core/": "scheduler",
    "policies/": "policy",
    "pagedsim/sim/": "cost",  # with the arithmetic of models and hardware
    "pagedsim/sim/cost/work.py": "summary",
    **{f"pagedsim/sim/{name}.py": "driver" for name in _DRIVER},
    "pagedsim/workload/": "workload",
    "pagedsim/metrics/": "summary",
    "pagedsim/metrics/recorder.py": "recorder",
    "pagedsim/run/backend.py": "recorder",
    "pagedsim/metrics/steps.py": "tables",
    "pagedsim/metrics/files.py": "tables",
    "pagedsim/report/": "plots",
    "": "command",  # settings, control of the study, and output
}
"""The layer of files by prefix of their paths; the longest prefix counts."""
MAKE_TABLES = {"take", "columns", "own_steps", "steps", "steps_table", "requests_table"}
"""Methods of recorders and columns that run after the simulation."""

Frame = tuple[str, str]
"""A file and a function."""


class Place(NamedTuple):
    """Where time is spent."""

    layer: str
    function: str


@dataclass
class Case:
    """A command and its measurements."""

    words: Sequence[str]
    steps: int = 0
    requests: int = 0
    cost: Cost = field(default_factory=Cost)
    """Of the whole command without the sampler."""
    samples: Counter[Place] = field(default_factory=Counter)

    def of(self, layer: str) -> int:
        return sum(times for place, times in self.samples.items() if place.layer == layer)


def layers(words: Sequence[str]) -> None:
    """Print the cost of each layer, and its most expensive functions."""
    only = {"nargs": "+", "choices": [*cases(None, 1)], "default": [*cases(None, 1)]}
    options = {"--trace": TRACE, "--requests": 10_000, "--rounds": 5, "--functions": 0}
    asked = parse(__doc__, words, {**options, "--only": only})
    found = cases(asked.trace, asked.requests)
    found = {name: found[name] for name in asked.only}
    for _ in range(asked.rounds):
        for case in found.values():
            measure(case)
    print("\n".join(written(found, asked.functions)))


def cases(trace: str | None, requests: int) -> dict[str, Case]:
    """The commands by name."""
    talk = conversation(trace, requests)
    return {
        "conversations": Case(talk),
        "short requests": Case(short(requests, 154, 312, 1000)),
        "a step ahead": Case((*talk, AHEAD)),
        "prefix caching": Case(sessions(requests)),
        "displacing priority": Case((*talk, *DISPLACING)),
    }


def measure(case: Case) -> None:
    """Add a round: the command without the sampler, then with it."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        case.cost.add(lambda: sampled_run(case.words, folder / "plain", 0.0) or 0.0)
        for path in (folder / "plain").rglob("*.parquet"):
            rows = parquet.read_metadata(path).num_rows
            setattr(case, path.stem, rows)  # requests and steps
        while sampled_run(case.words, folder / "sampled", INTERVAL) is None:
            pass  # of some thousands of samples one ends the process: a torn stack, a lost call
        lines = (folder / "sampled.txt").read_text(errors="replace").splitlines()
        case.samples.update(map(place, stacks(lines)))


def sampled_run(words: Sequence[str], folder: Path, interval: float) -> float | None:
    """Processor time of a command; None if the sampler ended it."""
    file = folder.with_suffix(".txt")
    sampler = "pagedsim.experiments.benchmarks.stack_sampler"
    command = [sys.executable, "-m", sampler, str(file), str(interval), *SERVER, *words]
    command.append(f"hydra.run.dir={folder}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not interval:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return None if done.returncode else float(done.stdout.split()[-1])


def stacks(lines: Sequence[str]) -> Iterator[list[Frame]]:
    """Each stack, the innermost frame first."""
    stack: list[Frame] = []
    for line in lines:
        if line.startswith("  File "):
            _, file, rest = line.split('"', 2)
            stack.append((file, rest.rpartition(" in ")[2]))
        elif stack:
            yield stack
            stack = []
    if stack:
        yield stack


def place(stack: Sequence[Frame]) -> Place:
    """The layer and function that a sample counts for."""
    for number, (file, function) in enumerate(stack):
        if not file.startswith(COUNTED):
            continue
        if any(outer.startswith("<frozen importlib") for outer, _ in stack):
            return Place("imports", file.removeprefix(TREE))
        for outer, name in stack[number:]:  # a comprehension counts for its function
            if outer != file:
                break
            function = name
            if not name.startswith("<"):
                break
        if file.startswith(SIMPY):
            return Place("SimPy", function)
        short = file.removeprefix(TREE)
        return Place(layer_of(short, function), f"{short}: {function}")
    return Place("command", "before and after")


def layer_of(file: str, function: str) -> str:
    """The layer of a function of ours."""
    layer = PLACES[max((start for start in PLACES if file.startswith(start)), key=len)]
    return "tables" if layer == "recorder" and function in MAKE_TABLES else layer


def written(found: Mapping[str, Case], functions: int) -> Iterator[str]:
    """The tables."""
    counts: dict[str, Callable[[Case], int]] = {
        **{layer: partial(Case.of, layer=layer) for layer in LAYERS},
        "*the first seven*": lambda case: sum(map(case.of, LOOP)),
        "*all*": lambda case: case.samples.total(),
    }
    for what in ("requests", "steps"):
        rows = [
            [name, *(_cost_cell(case, count(case), what) for case in found.values())]
            for name, count in counts.items()
        ]
        yield table([f"timeouts a {what.removesuffix('s')}", *found], rows) + "\n"
    for name, case in found.items() if functions else ():
        for layer in LAYERS:
            own = {one.function: n for one, n in case.samples.items() if one.layer == layer}
            if own:
                yield f"{name}, {layer}: timeouts a request"
            for function, samples in Counter(own).most_common(functions):
                yield f"  {_cost_cell(case, samples, 'requests'):>15}  {function}"


def _cost_cell(case: Case, samples: int, what: str) -> str:
    """Timeouts and their standard error, which comes from the number of samples."""
    each = median(case.cost.timeouts) / case.samples.total() / max(1, getattr(case, what))
    error = sqrt(samples * (1 - samples / case.samples.total()))
    return f"{samples * each:.2f} ± {error * each:.2f}"


# -- whole commands --------------------------------------------------------------------------------

COMMANDS = (
    "experiment=fcfs_vs_priority",
    "experiment=sweep study.over=memory.block_size study.values=[8,16,32]",
    "experiment=single",
    "experiment=estimate",
    "--help",
    "--version",
    "serve port=0",
)


def commands(words: Sequence[str]) -> None:
    """Print the cost of each command."""
    asked = parse(__doc__, words, {"--rounds": 5})
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))
    costs = {line: Cost() for line in COMMANDS}
    for _ in range(asked.rounds):
        for line, cost in costs.items():
            cost.add(partial(run, line.split()))
    rows = []
    for line, cost in costs.items():
        timeouts, seconds = min(zip(cost.timeouts, cost.seconds, strict=True))
        rows.append([f"`{line}`", f"{seconds:.2f}", f"{timeouts / 1e6:.2f}"])
    print(table(["python -m pagedsim", "seconds", "million timeouts"], rows))


def run(words: Sequence[str]) -> float:
    """Processor seconds of a command in an empty folder, to its end or until a server listens."""
    before, command = children_cpu_seconds(), [sys.executable, "-m", "pagedsim", *words]
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if "serve" in words and "http://" in line:
                process.send_signal(signal.SIGTERM)
        process.wait()
    if process.returncode:
        raise SystemExit(output)
    return children_cpu_seconds() - before


main = main_of(__name__, layers, commands)
