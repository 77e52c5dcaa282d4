"""What commands take from their first to their last instruction, all of their processes together.

    python -m experiments.benchmarks.front_door [--rounds 5] [--only study help] [--with seeds=1]

Each runs in an empty folder, as a user types it, with compiled files of modules in place. Times are
the processor's, of the round with the fewest timeouts; a timeout is a plain SimPy timeout that is
measured beside it. Then the study runs once more in each round with clocks around its parts.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from experiments.benchmarks.front_door_child import OTHER, PARTS, PROCESSES
from experiments.benchmarks.words import Parser, at_least_one
from experiments.benchmarks.yardstick import timeout_seconds

COMMANDS = {
    "study": ["experiment=fcfs_vs_priority"],
    "sweep": ["experiment=sweep", "study.over=memory.block_size", "study.values=[8,16,32]"],
    "single": ["experiment=single"],
    "estimate": ["experiment=estimate"],
    "help": ["--help"],
    "version": ["--version"],
    "serve": ["serve", "port=0"],
}
"""What is measured; `serve` until it says where it listens."""
STUDIES = ("study", "sweep", "single")
"""Those that take the words of `--with`."""


class Took(NamedTuple):
    """One round of a command."""

    timeouts: float
    seconds: float


def timed(work: Callable[[Path], None]) -> Took:
    """What processes take that `work` has started and waited for, in an empty folder."""
    with TemporaryDirectory() as folder:
        yardstick = timeout_seconds()
        begun = _of_children()
        work(Path(folder))
        seconds = _of_children() - begun
        yardstick = (yardstick + timeout_seconds()) / 2
    return Took(seconds / yardstick, seconds)


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(words: Sequence[str], folder: Path) -> None:
    """A command to its end, or a server until it listens."""
    command = [sys.executable, *words]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "serve" in words and "http://" in line:
                process.send_signal(signal.SIGTERM)
    if process.returncode:
        raise SystemExit(said)


def by_part(words: Sequence[str]) -> tuple[Took, Mapping[str, float]]:
    """A command with clocks: what it took in all, and processor seconds by part."""
    parts: defaultdict[str, float] = defaultdict(float)

    def work(folder: Path) -> None:
        clocks, inside = folder / "clocks", folder / "run"
        clocks.mkdir()
        inside.mkdir()
        child = "experiments.benchmarks.front_door_child"
        run(["-m", child, str(clocks), *words], inside)
        for file in clocks.iterdir():
            found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
            if PROCESSES not in found:  # a worker: the command counts it as a process
                parts[PROCESSES] -= sum(found.values())
            for part, seconds in found.items():
                parts[part] += seconds

    return timed(work), parts


def told(took: Took, name: str) -> str:
    """A line of a table."""
    return f"| {name} | {took.seconds:.2f} | {took.timeouts / 1e6:.2f} |"


def main(words: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=[*COMMANDS])
    parser.add_argument("--with", dest="more", nargs="+", default=[], help="words for studies")
    asked = parser.parse_args(words)
    root = Path(__file__).parents[2]  # commands run elsewhere
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.getenv("PYTHONPATH"))))
    commands = {
        name: [*COMMANDS[name], *(asked.more if name in STUDIES else ())] for name in asked.only
    }
    found: dict[str, list[Took]] = {name: [] for name in commands}
    parts: list[tuple[Took, Mapping[str, float]]] = []
    for _ in range(asked.rounds):
        for name, line in commands.items():
            found[name].append(timed(partial(run, ["-m", "pagedsim", *line])))
        if "study" in commands:
            parts.append(by_part(commands["study"]))
    print("| python -m pagedsim | seconds | million timeouts |\n|---|---|---|")
    for name, rounds in found.items():
        print(told(min(rounds), f"`{' '.join(commands[name])}`"))
    if parts:
        whole, least = min(parts)
        print("\n| part of the first | seconds | million timeouts |\n|---|---|---|")
        for part in ("imports", *PARTS, PROCESSES, OTHER):
            share = least[part] / whole.seconds
            print(told(Took(whole.timeouts * share, least[part]), part))


if __name__ == "__main__":
    main()
