"""Digests of the code that a measurement runs.

It imports no torch, so that a plugin of pytest may use it in every process.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

from pagedsim.experiments.benchmarks.harness import ROOT

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
