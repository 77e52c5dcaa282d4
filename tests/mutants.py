"""Mutation testing: change one expression at a time and see whether a test fails.

    python -m tests.mutants pagedsim/cluster --tests tests/cluster --sample 40
    python -m tests.mutants policies/fairness.py --tests tests/policies --seed 3

The mutants of a path depend on its source and the seed alone. Whether tests may go is seen by
running the command before and after: no mutant that was caught survives. A mutant is caught where
pytest fails, is ended by a signal, runs out of the memory allowed to it or takes too long. The work
is done in a copy of the files that git tracks; the exit code is 1 where a mutant survives.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMPARISONS: dict[type[ast.cmpop], str] = {
    **{ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"},
}
OPERATORS: dict[type[ast.operator], str] = {
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"},
}
# What Python, numpy, torch, C++ libraries and the operating system say where no memory is left.
OUT_OF_MEMORY = re.compile(
    r"^(E +)?([\w.]+\._Array)?MemoryError\b"
    r"|DefaultCPUAllocator|std::bad_alloc|Cannot allocate memory",
    re.MULTILINE,
)


class Mutant(NamedTuple):
    """One replacement in a file, between two offsets of its UTF-8 text."""

    path: Path
    line: int
    begin: int
    end: int
    new: bytes

    def applied(self) -> bytes:
        """The text of the file with the replacement."""
        text = (ROOT / self.path).read_bytes()
        return text[: self.begin] + self.new + text[self.end :]

    def __str__(self) -> str:
        old = (ROOT / self.path).read_bytes()[self.begin : self.end].decode()
        return f"{self.path}:{self.line}: {old} -> {self.new.decode()}"


class Source:
    """A module's text, with the places of its nodes as offsets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = (ROOT / path).read_bytes()
        self._starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def code(self, node: ast.expr) -> str:
        begin, end = self.span(node)
        return self.text[begin:end].decode()

    def mutants(self) -> Iterator[Mutant]:
        """Every mutant of the module. Annotations and docstrings have none."""
        for statement in ast.walk(ast.parse(self.text)):
            if isinstance(statement, ast.stmt):
                yield from self._of(statement)

    def _of(self, statement: ast.stmt) -> Iterator[Mutant]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield self._replace(statement, "None")
        if isinstance(statement, ast.AugAssign) and type(statement.op) in OPERATORS:
            target, value = self.code(statement.target), self.code(statement.value)
            yield self._replace(statement, f"{target} = {value}")
        for expression in _own_expressions(statement):
            for node in ast.walk(expression):
                if isinstance(node, ast.expr) and (new := self._changed(node)) is not None:
                    yield self._replace(node, new)

    def _changed(self, node: ast.expr) -> str | None:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                return f"{self.code(left)} {COMPARISONS[type(op)]} {self.code(right)}"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return f"{self.code(left)} {OPERATORS[type(op)]} {self.code(right)}"
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                return word.join(f"({self.code(value)})" for value in values)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"bool({self.code(operand)})"
            case ast.IfExp(body=body, orelse=orelse):
                return f"({self.code(orelse)} or {self.code(body)})"
            case ast.Constant(value=bool() as value):
                return str(not value)
            case ast.Constant(value=int() | float() as value):
                return f"({value!r} + 1)"
        return None

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> Mutant:
        begin, end = self.span(node)
        return Mutant(self.path, node.lineno, begin, end, new.encode())


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions of a statement without those of the statements inside it."""
    annotations = {"annotation", "returns", "decorator_list"}
    for name, value in ast.iter_fields(statement):
        if name not in annotations:
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.expr):
                    yield one


def sample(paths: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """At most `count` mutants of the modules below `paths`, by lot."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.rglob("*.py")) if (ROOT / path).is_dir() else [path]
    found = [mutant for file in files for mutant in Source(file).mutants()]
    return sorted(random.Random(seed).sample(found, min(count, len(found))))


class Verdict(NamedTuple):
    """What became of a mutant: whether a test caught it, and by what if not by failing."""

    caught: bool
    by: str = ""
    output: str = ""  # of pytest

    def __str__(self) -> str:
        word = "caught" if self.caught else "survived"
        return f"{word} ({self.by})" if self.by else f"{word:<8}"


def verdict(
    mutant: Mutant, copy: Path, tests: Sequence[str], timeout: float, memory: float
) -> Verdict:
    """What pytest makes of `tests` in `copy` with the mutant in place.

    Each process of the tests may take `memory` GiB of heap, stacks and other private writable
    memory. Neither libraries nor address space that is only reserved count.
    """
    file = copy / mutant.path
    kept = file.read_bytes()
    file.write_bytes(mutant.applied())
    words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    most = int(memory * 2**30)
    try:
        with subprocess.Popen(
            [sys.executable, *words],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_DATA, (most, most)),
        ) as process:
            try:
                output = process.communicate(timeout=timeout)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                return Verdict(True, "time limit")
            finally:  # what the tests started ends with them
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        file.write_bytes(kept)
    return Verdict(process.returncode != 0, _cause(process.returncode, output), output)


def _cause(returncode: int, output: str) -> str:
    """By what pytest ended if it did not end by itself, or which limit a test ran into."""
    if returncode and OUT_OF_MEMORY.search(output):
        return "memory limit"
    return signal.Signals(-returncode).name if returncode < 0 else ""


def copied(folder: Path) -> Path:
    """The tracked files of the repository below `folder`."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("paths", nargs="+", type=Path, help="modules or folders to change")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest runs")
    parser.add_argument("--sample", type=int, default=30, help="number of mutants (30)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (0)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds; more is caught (300)")
    parser.add_argument("--memory", type=float, default=4, help="GiB a process; more is caught (4)")
    given = parser.parse_args()
    for path in given.paths:
        if not (ROOT / path).exists():
            parser.error(f"{path}: no such file or folder in {ROOT}")
    drawn = sample(given.paths, given.sample, given.seed)
    if not drawn:
        parser.error("nothing to change: no expression that a mutant could replace, or --sample=0")
    with tempfile.TemporaryDirectory() as scratch:
        copy = copied(Path(scratch))
        unchanged = drawn[0]._replace(end=drawn[0].begin, new=b"")
        plain = verdict(unchanged, copy, given.tests, 3600, given.memory)
        if plain.caught:
            sys.exit(f"the tests fail without any change: {plain.by}\n{plain.output[-2000:]}")
        alive = 0
        for mutant in drawn:
            found = verdict(mutant, copy, given.tests, given.timeout, given.memory)
            alive += not found.caught
            print(found, mutant, flush=True)
    print(f"{len(drawn) - alive} of {len(drawn)} caught")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
