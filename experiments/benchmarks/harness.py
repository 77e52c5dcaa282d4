"""Shared parts of all benchmarks: command lines, rounds, costs, tables and files.

Machines differ, so a cost is also given in SimPy timeouts: the processor time of one plain timeout,
measured in the same process before and after the work. `device.py` has what needs torch: times of
calls on a GPU, and runs with results.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn, TypeVar

from pagedsim.core import PagedsimError
from pagedsim.metrics.files import write_json

ROOT = Path(__file__).parents[2]
NAME = "pagedsim.experiments.benchmarks"
TIMEOUTS = 200_000
"""SimPy timeouts that are timed as one."""

K = TypeVar("K")
T = TypeVar("T")
Command = Callable[[Sequence[str]], None]
"""A benchmark; takes the words of its command line."""


# -- command lines ---------------------------------------------------------------------------------


class Parser(ArgumentParser):
    """A parser that keeps line breaks in its help and ends with one line for an error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists what there is\n")


def positive_int(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    with suppress(ValueError):
        if (number := float(text)) > 0 and isfinite(number):
            return number
    raise ArgumentTypeError(f"{text}: must be a number above 0")


def parse(doc: str | None, words: Sequence[str], options: Mapping[str, Any]) -> Namespace:
    """The options of a command line.

    An option is declared by its default: a number, a text, a list for several values, or a tuple of
    choices, of which the first is the default; any other by the arguments of `add_argument`.
    """
    parser = Parser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name, declared in options.items():
        parser.add_argument(name, **_argument(declared))
    return parser.parse_args(words)


def _argument(declared: Any) -> dict[str, Any]:
    match declared:
        case dict():
            return declared
        case tuple():
            return {"choices": declared, "default": declared[0]}
    several = isinstance(declared, list)
    kind = type(declared[0] if several else declared)
    read = {int: positive_int, float: positive_float}.get(kind, kind)
    settings = {"type": read, "default": declared, "help": f"default: {declared}"}
    return {**settings, "nargs": "+"} if several else settings


def main_of(module: str, *commands: Command) -> Callable[..., None]:
    """The `main` of a module: runs the command that the first word names, or the first command.

    It is called at once if the module is the program.
    """
    named = {command.__name__: command for command in commands}

    def main(words: Sequence[str] | None = None) -> None:
        words = sys.argv[1:] if words is None else words
        try:
            if words and words[0] in named:
                named[words[0]](words[1:])
            else:
                commands[0](words)
        except PagedsimError as error:
            sys.exit(str(error))

    if module == "__main__":
        main()
    return main


# -- rounds and costs ------------------------------------------------------------------------------


def in_turns(calls: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """The results of each call in each round; all take turns, so that a change of the machine's
    speed is in all of them, and ratios within a run are fair."""
    results: dict[K, list[T]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            results[name].append(call())
    return results


class Cost(NamedTuple):
    """Processor time of some work."""

    seconds: float
    timeouts: float
    """The same in timeouts timed beside it, since the speed of a machine varies."""


def cost_of(work: Callable[[], object]) -> Cost:
    """Call it between two timings of a timeout."""
    before, seconds = timeout_seconds(), cpu_seconds(work)
    return Cost(seconds, 2 * seconds / (before + timeout_seconds()))


def cost_cells(costs: Sequence[Cost], digits: int, per: float = 1) -> list[str]:
    """Table cells: median and lowest seconds, median and lowest timeouts of each of `per`."""
    seconds, timeouts = zip(*costs, strict=True)
    times = [f"{of(seconds):.{digits}f}" for of in (median, min)]
    return times + [f"{of(timeouts) / per:.1f}" for of in (median, min)]


def timeout_seconds() -> float:
    """Processor seconds of one timeout of an otherwise idle SimPy process."""
    import simpy

    environment, count = simpy.Environment(), TIMEOUTS

    def wait() -> Generator[simpy.Event, None, None]:
        for _ in range(count):
            yield environment.timeout(1.0)

    environment.process(wait())
    return cpu_seconds(environment.run) / count


def cpu_seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, which is steadier than wall time on a shared machine."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


# -- tables and files ------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def columns(lines: Iterable[T], cells: Mapping[str, Callable[[T], str]]) -> str:
    """A Markdown table with a row for each line, and the cells under their heads."""
    return table([*cells], [[cell(line) for cell in cells.values()] for line in lines])


def keep(place: Path, name: str, result: Mapping[str, Any]) -> None:
    """Write `name`.json; a process killed here leaves the previous file."""
    place.mkdir(parents=True, exist_ok=True)
    part = place / f".{name}.part"
    write_json(part, dict(result))
    part.replace(place / f"{name}.json")


# -- a digest of the code that a measurement of a GPU runs -----------------------------------------

CODE = (
    *("kernels", "pagedsim/core", "pagedsim/engine", "pagedsim/fidelity", "conf/model"),
    *("experiments/benchmarks", "experiments/fidelity", "tests/kernels", "tests/engine"),
)
"""Its folders; libraries are not in it, facts have their versions."""
LENGTH = 16


@cache
def digest() -> str:
    """A digest of the contents and places of the code, the same in every clone."""
    total = sha256()
    for path in sorted(path for folder in CODE for path in ROOT.glob(f"{folder}/**/*.[py]*")):
        if path.suffix in (".py", ".yaml"):
            content = path.read_bytes()
            total.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()[:LENGTH]
