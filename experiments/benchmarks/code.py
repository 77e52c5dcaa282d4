"""Of which code a number is: a digest of all files of ours that a module runs.

What a module imports, and what that imports, is read from the sources, inside functions too. The
digest is of their contents and their places in the tree, so that it is the same in every clone,
with git or without. What transformers or Triton do is not in it: results name their versions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("pagedsim", "policies", "experiments", "tests")
READ = {"experiments.benchmarks.shapes": ("conf/model/llama-3.1-8b.yaml",)}
"""What a module reads besides."""
UNREAD = ("pagedsim.report", "experiments.benchmarks.roofline")
"""Pictures: how they look changes no number."""
LENGTH = 16
"""Hexadecimal digits."""


@cache
def digest(*modules: str) -> str:
    """Of all that these modules run; of nothing for modules that are not ours."""
    found = sha256()
    for path in sorted(files(modules), key=str):
        content = (ROOT / path).read_bytes()
        found.update(f"{path.as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()[:LENGTH]


def files(modules: Iterable[str]) -> set[Path]:
    """The files of ours that these modules run or read, from the root of the tree."""
    left, seen = list(modules), set[str]()
    found = set[Path]()
    while left:
        name = left.pop()
        if name in seen or name.partition(".")[0] not in OURS or name.startswith(UNREAD):
            continue
        seen.add(name)
        if "." in name:
            left.append(name.rpartition(".")[0])  # importing a module runs its packages
        if (path := _file(name)) is not None:
            found.add(path)
            found.update(map(Path, READ.get(name, ())))
            left += _imported(path, name)
    return found


def _file(module: str) -> Path | None:
    """Where it stands, if it is a module: it may be a name inside one."""
    place = Path(*module.split("."))
    for path in (place / "__init__.py", place.with_suffix(".py")):
        if (ROOT / path).exists():
            return path
    return None


@cache
def _imported(path: Path, module: str) -> tuple[str, ...]:
    """What is imported anywhere in a file."""
    return tuple(_names(ast.parse((ROOT / path).read_bytes()), module, path))


def _names(tree: ast.AST, module: str, path: Path) -> Iterator[str]:
    left = [tree]
    while left:
        node = left.pop()
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING")):  # that never runs
                left += node.orelse
                continue
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    package = module.split(".")[: None if path.name == "__init__.py" else -1]
                    above = package[: len(package) - node.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
            case ast.Call(
                func=ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name
        left += ast.iter_child_nodes(node)
