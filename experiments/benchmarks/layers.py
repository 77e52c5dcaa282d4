"""Where the time of a whole command goes, layer by layer, in timeouts a request and an iteration.

    python -m experiments.benchmarks.layers [--trace conv_poisson_4.5rps_10000.csv] [--functions 5]

Each round runs `python -m pagedsim experiment=single` twice: once for its processor time, and once
with its stack written down every few milliseconds. A moment counts for the innermost frame that is
ours or SimPy's, so that what libraries do counts for who called them, and all that an import runs
for imports. Layers are shares of these moments, times the time of the command without the sampler.

A stack is read whatever the interpreter is doing, so about once in some thousands of times it is
not whole, or a system call's error is lost, and the process dies; then it is run again. Compiled
code has no frames: what it does counts for whoever called it from Python, SimPy for the most part.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import simpy
from pyarrow import parquet

import pagedsim
from experiments.benchmarks.words import Parser, at_least_one, at_least_zero, existing
from experiments.benchmarks.yardstick import timeout_seconds

BETWEEN = 0.003
"""Seconds between two looks."""
ROOT = str(Path(pagedsim.__file__).parents[1]) + "/"
SIMPY = str(Path(simpy.__file__).parent) + "/"
COUNTED = (SIMPY, *(f"{ROOT}{folder}/" for folder in ("pagedsim", "policies", "experiments")))
"""Whose frames count; an environment of libraries may stand beside these."""
LOOP = ("scheduler", "policy", "driver", "cost", "recorder", "SimPy", "workload")
"""Layers that are at work while simulated time passes."""
LAYERS = (*LOOP, "tables", "summary", "plots", "imports", "command")
_DRIVER = ("ahead", "arrivals", "beams", "environment", "feed", "server", "simulate", "tiers")
PLACES: Mapping[str, str] = {
    "pagedsim/core/": "scheduler",
    "policies/": "policy",
    "pagedsim/sim/": "cost",  # with the arithmetic of models and hardware that it asks
    "pagedsim/sim/cost/work.py": "summary",
    **{f"pagedsim/sim/{name}.py": "driver" for name in _DRIVER},
    "pagedsim/workload/": "workload",
    "pagedsim/metrics/": "summary",
    "pagedsim/metrics/recorder.py": "recorder",
    "pagedsim/metrics/columns.py": "recorder",
    "pagedsim/run/stoppable.py": "recorder",
    "pagedsim/metrics/steps.py": "tables",
    "pagedsim/metrics/files.py": "tables",
    "pagedsim/report/": "plots",
    "": "command",  # settings, the life of a study, and what it prints
}
"""The layer of files by how their names begin; the longest that fits counts."""
MAKE_TABLES = {"take", "columns", "own_steps", "steps", "steps_table", "requests_table"}
"""What a recorder does when the run is over."""

Frame = tuple[str, str]
"""A file and a function."""


@dataclass
class Case:
    """A command, and what was found of it."""

    words: Sequence[str]
    steps: int = 0
    requests: int = 0
    timeouts: list[float] = field(default_factory=list)
    """Of the whole command without the sampler, round by round."""
    seconds: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    """Seconds with the sampler."""
    moments: Counter[Place] = field(default_factory=Counter)
    again: int = 0
    """Rounds that died of being looked at."""

    @property
    def looks(self) -> int:
        """How often it was looked at."""
        return self.moments.total()

    def cost(self, moments: int) -> float:
        """Timeouts of so many moments, in a run."""
        return moments / self.looks * median(self.timeouts)

    def of(self, layer: str) -> int:
        """The moments of a layer."""
        return sum(times for place, times in self.moments.items() if place.layer == layer)


class Place(NamedTuple):
    """Where the time goes."""

    layer: str
    function: str


def cases(trace: str | None, requests: int) -> dict[str, Case]:
    """The commands that are looked at."""
    server = ("server.max_model_len=4096", "memory.blocks=7424")
    shape = (
        "{shape: lognormal, prompt_mean: 1000, prompt_cv: 0.9, output_mean: 211, output_cv: 0.8}"
    )
    drawn = ("workload=sharegpt", "workload.rate=4.5", f"workload.lengths={shape}")
    talk = (
        *(("workload=trace", f"workload.path={trace}") if trace else drawn),
        *(f"workload.requests={requests}", "workload.max_len=4096", "server.max_seqs=128", *server),
    )
    short = (
        *("workload=fixed", "workload.arrivals=poisson", "workload.rate=1000"),
        *(f"workload.requests={requests}", "workload.lengths={shape:fixed,prompt:154,output:312}"),
        *("server.max_seqs=256", *server),
    )
    turns = (
        *("workload=chat_sessions", f"workload.sessions={max(1, requests // 4)}"),
        *("workload.rate=1.1", "server.max_seqs=128", *server),
    )
    displacing = ("policy=priority", "policy.displace=true", "workload.priority={0:0.2,1:0.8}")
    return {
        "conversations": Case(talk),
        "short requests": Case(short),
        "a step ahead": Case((*talk, "server.async_scheduling=true")),
        "prefix caching": Case((*turns, "memory=prefix")),
        "displacing priority": Case((*talk, *displacing)),
    }


# -- looking ---------------------------------------------------------------------------------------


def look(case: Case) -> None:
    """One round."""
    with TemporaryDirectory() as name:
        yardstick, folder = timeout_seconds(), Path(name)
        took = _run(case.words, folder / "plain", 0.0)
        assert took is not None
        yardstick = (yardstick + timeout_seconds()) / 2
        case.seconds.append(took)
        case.timeouts.append(took / yardstick)
        for path in (folder / "plain").rglob("*.parquet"):
            rows = parquet.read_metadata(path).num_rows
            setattr(case, path.stem, rows)  # requests and steps
        while (found := _run(case.words, folder / "sampled", BETWEEN)) is None:
            case.again += 1
        case.sampled.append(found)
        lines = (folder / "sampled.txt").read_text(errors="replace").splitlines()
        case.moments.update(map(place, stacks(lines)))


def _run(words: Sequence[str], folder: Path, between: float) -> float | None:
    """Run a command; its processor time, None if it died of being looked at."""
    file = folder.with_suffix(".txt")
    command = [
        *(sys.executable, "-m", "experiments.benchmarks.layers_child", str(file), str(between)),
        *("experiment=single", "model=llama-2-7b", "tracking=none", "seeds=1", "jobs=1"),
        *(*words, f"hydra.run.dir={folder}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not between:
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
    """What a moment counts for."""
    for number, (file, function) in enumerate(stack):
        if not file.startswith(COUNTED):
            continue
        if any(outer.startswith("<frozen importlib") for outer, _ in stack):
            return Place("imports", file.removeprefix(ROOT))
        for outer, name in stack[number:]:  # a comprehension is its function's
            if outer != file:
                break
            function = name
            if not name.startswith("<"):
                break
        if file.startswith(SIMPY):
            return Place("SimPy", function)
        short = file.removeprefix(ROOT)
        return Place(layer_of(short, function), f"{short}: {function}")
    return Place("command", "before and after")


def layer_of(file: str, function: str) -> str:
    """The layer of a function of ours."""
    layer = PLACES[max((start for start in PLACES if file.startswith(start)), key=len)]
    return "tables" if layer == "recorder" and function in MAKE_TABLES else layer


# -- telling ---------------------------------------------------------------------------------------


def told(found: Mapping[str, Case], functions: int) -> Iterator[str]:
    """The tables, as lines."""
    yield from whole(found)
    for what in ("requests", "steps"):
        yield ""
        yield f"| timeouts a {what.removesuffix('s')} | {' | '.join(found)} |"
        yield "|---" * (1 + len(found)) + "|"
        for layer in LAYERS:
            yield _row(layer, [_cell(case, case.of(layer), what) for case in found.values()])
        loop = [sum(map(case.of, LOOP)) for case in found.values()]
        pairs = list(zip(found.values(), loop, strict=True))
        yield _row("*the first seven*", [_cell(case, moments, what) for case, moments in pairs])
        yield _row("*all*", [_cell(case, case.looks, what) for case in found.values()])
    for name, case in found.items() if functions else ():
        for layer in LAYERS:
            yield from _functions(name, case, layer, functions)


def whole(found: Mapping[str, Case]) -> Iterator[str]:
    """Commands by themselves, and what the sampler adds to them."""
    yield "| command | requests | steps | seconds | lowest | with the sampler | looks | run again |"
    yield "|---" * 8 + "|"
    for name, case in found.items():
        took, lowest = median(case.seconds), min(case.seconds)
        more = median(case.sampled) / took - 1
        cells = [f"{case.requests:,}", f"{case.steps:,}", f"{took:.2f}", f"{lowest:.2f}"]
        yield _row(name, [*cells, f"{more:+.1%}", f"{case.looks:,}", f"{case.again}"])


def _cell(case: Case, moments: int, what: str) -> str:
    """Timeouts, and the standard error that comes of looking so seldom."""
    each = case.cost(1) / max(1, getattr(case, what))
    error = sqrt(moments * (1 - moments / case.looks))
    return f"{moments * each:.2f} ± {error * each:.2f}"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _functions(name: str, case: Case, layer: str, most: int) -> Iterator[str]:
    """The most expensive functions of a layer."""
    some = Counter({one.function: n for one, n in case.moments.items() if one.layer == layer})
    if some:
        yield f"\n{name}, {layer}: timeouts a request"
    for function, moments in some.most_common(most):
        yield f"  {_cell(case, moments, 'requests'):>15}  {function}"


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=existing, help="CSV: arrived_at, num_prefill_tokens, num_decode_tokens"
    )
    parser.add_argument("--requests", type=at_least_one, default=10_000, help="of each workload")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument(
        "--functions", type=at_least_zero, default=0, help="the most expensive by layer"
    )
    parser.add_argument("--only", nargs="+", choices=list(cases(None, 1)), help="of the commands")
    asked = parser.parse_args(words)
    found = cases(asked.trace, asked.requests)
    found = {name: found[name] for name in asked.only or found}
    for _ in range(asked.rounds):
        for case in found.values():
            look(case)
    print("\n".join(told(found, asked.functions)))


if __name__ == "__main__":
    main()
