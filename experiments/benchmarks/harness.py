"""Shared parts of all benchmarks: command lines, costs, tables, processes and digests of code.

Machines differ, so a cost is also given in SimPy timeouts: the processor time of one plain timeout,
measured in the same process before and after the work. It imports no torch, so that a plugin of
pytest may use it in every process.
"""

from __future__ import annotations

import ast
import resource
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeVar

from pagedsim.metrics.files import write_json

ROOT = Path(__file__).parents[2]
"""The root of the repository."""
TIMEOUTS = 200_000
"""SimPy timeouts that are timed as one."""

T = TypeVar("T")
Command = Callable[[Sequence[str]], None]
"""A benchmark; takes the words of its command line."""


# -- command lines ---------------------------------------------------------------------------------


class Parser(ArgumentParser):
    """A parser that keeps line breaks in its help and ends with one line for an error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists what there is\n")


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text}: must be a whole number of at least {least}")
    return int(text)


non_negative_int = partial(_whole, least=0)
positive_int = partial(_whole, least=1)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    with suppress(ValueError):
        if (number := float(text)) > 0 and isfinite(number):
            return number
    raise ArgumentTypeError(f"{text}: must be a number above 0")


def existing_file(text: str) -> str:
    """The path of an existing file."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f"{text}: there is no such file")
    return text


def parse(doc: str | None, words: Sequence[str], options: Mapping[str, Any]) -> Namespace:
    """The options of a command line.

    An option is declared by its default: a number, a text, False for a flag, a list for several
    values, or a tuple of choices, of which the first is the default. An option without a default is
    declared by its type, and any other by the arguments of `add_argument`.
    """
    parser = Parser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name, declared in options.items():
        parser.add_argument(name, **_argument(declared))
    return parser.parse_args(words)


def _argument(declared: Any) -> dict[str, Any]:
    match declared:
        case dict():
            return declared
        case False:
            return {"action": "store_true"}
        case tuple():
            return {"choices": declared, "default": declared[0]}
        case list():
            return {"nargs": "+", "type": _type(declared[0]), "default": declared}
        case int() | float() | str():
            return {"type": _type(declared), "default": declared, "help": f"default: {declared}"}
    return {"type": declared}


def _type(default: float | str) -> Callable[[str], Any]:
    if isinstance(default, str):
        return str
    if isinstance(default, float):
        return positive_float
    return positive_int if default else non_negative_int


def main_of(module: str, *commands: Command) -> Callable[..., None]:
    """The `main` of a module: runs the command that the first word names, or the first command.

    It is called at once if the module is the program.
    """
    named = {one.__name__: one for one in commands}

    def main(words: Sequence[str] | None = None) -> None:
        words = sys.argv[1:] if words is None else words
        if words and words[0] in named:
            named[words[0]](words[1:])
        else:
            commands[0](words)

    if module == "__main__":
        main()
    return main


# -- costs -----------------------------------------------------------------------------------------


@dataclass
class Cost:
    """The cost of the same work, round by round."""

    seconds: list[float] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    """The same in timeouts of the same round, since the speed of a machine varies."""

    def add(self, measure: Callable[[], float]) -> None:
        """Add a round; `measure` returns its seconds and runs between two timings of a timeout."""
        before, seconds = timeout_seconds(), measure()
        self.seconds.append(seconds)
        self.timeouts.append(2 * seconds / (before + timeout_seconds()))

    def cells(self, digits: int, per: int = 1) -> list[str]:
        """Table cells: median and lowest seconds, median and lowest timeouts of each of `per`."""
        times = [f"{of(self.seconds):.{digits}f}" for of in (median, min)]
        return times + [f"{of(self.timeouts) / per:.1f}" for of in (median, min)]


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


def children_cpu_seconds() -> float:
    """Processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_mb() -> float:
    """The highest resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_new_process(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a process of its own, so that its peak memory is that of this call."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


# -- tables and files ------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join([row(head), row(["---"] * len(head)), *map(row, rows)])


def columns(lines: Iterable[T], cells: Mapping[str, Callable[[T], str]]) -> str:
    """A Markdown table with a row for each line, and the cells under their heads."""
    return table([*cells], [[cell(line) for cell in cells.values()] for line in lines])


def row(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def keep(place: Path | None, name: str, result: Mapping[str, Any]) -> None:
    """Write `name`.json, as far as the measurement has come; without a folder, nothing."""
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        part = place / f".{name}.part"  # a process killed here leaves the previous file
        write_json(part, dict(result))
        part.replace(place / f"{name}.json")


# -- digests of the code that a measurement runs ---------------------------------------------------

PACKAGES = ("pagedsim", "tests")
BESIDE = ("policies", "kernels", "experiments")
"""Packages of pagedsim that stand beside it."""
READ = {"pagedsim.experiments.benchmarks.shapes": "conf/model/*.yaml"}
"""Data files that a module reads."""
NO_EFFECT = "pagedsim.report"
"""Drawing, which changes no number."""
LENGTH = 16
"""Hexadecimal digits of a digest."""


@cache
def digest(*modules: str) -> str:
    """A digest of all files of this repository that modules run or read.

    It is of their contents and places in the tree, so it is the same in every clone, with git or
    without. Libraries are not in it; facts have their versions.
    """
    found = sha256()
    for path in sorted(files(modules), key=str):
        content = (ROOT / path).read_bytes()
        found.update(f"{path.as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()[:LENGTH]


def files(modules: Iterable[str]) -> set[Path]:
    """The files that these modules run or read, relative to the root, by following imports."""
    left, seen, found = list(modules), set[str](), set[Path]()
    while left:
        name = left.pop()
        if name in seen or name.partition(".")[0] not in PACKAGES or name.startswith(NO_EFFECT):
            continue
        seen.add(name)
        if "." in name:
            left.append(name.rpartition(".")[0])  # an import runs the packages of a module
        parts = name.split(".")
        beside = parts[0] == "pagedsim" and len(parts) > 1 and parts[1] in BESIDE
        place = Path(*parts[1:] if beside else parts)
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if (ROOT / path).exists():  # or it is a name in a module
                data = ROOT.glob(READ[name]) if name in READ else ()
                found.update((path, *(one.relative_to(ROOT) for one in data)))
                left += _imported(path)
                break
    return found


@cache
def _imported(path: Path) -> list[str]:
    return list(_imports(ast.parse((ROOT / path).read_bytes())))


def _imports(tree: ast.AST) -> Iterator[str]:
    """All that a file imports, in functions, too."""
    left = [tree]
    while left:
        node = left.pop()
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING")):  # never runs
                left += node.orelse
                continue
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(base)):  # the tree has no relative imports
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
        left += ast.iter_child_nodes(node)
