"""The code that a run comes from, as digests: what is run again after it was changed."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path

_OURS = (
    *("pagedsim.core", "pagedsim.build", "pagedsim.server", "pagedsim.sim"),
    *("pagedsim.fleet", "pagedsim.run.fleet", "pagedsim.run.simulation"),
    *("pagedsim.workload", "pagedsim.metrics", "pagedsim.engine", "pagedsim.kernels", "policies"),
    *("pagedsim.run.job", "pagedsim.run.objects", "pagedsim.run.parts"),
    *("pagedsim.run.backend", "pagedsim.run.simulated", "pagedsim.run.serving"),
    *("pagedsim.run.machine", "pagedsim.run.clocks", "pagedsim.run.model_cache"),
    *("pagedsim.run.stoppable", "pagedsim.run.server", "pagedsim.fidelity.engine_model"),
)
"""What simulates, serves and measures. Reports, pictures and the front door change no run."""
_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


@cache
def of_the_simulator() -> str:
    """A digest of all our code that decides what comes out of a run, as it was when first asked."""
    return _digest(_our_files())


def of_target(path: str) -> str | None:
    """A digest of the user's code behind a dotted path: its module, and what that imports.

    None where all of it is ours, or where there is no such module.
    """
    files: dict[str, Path] = {}
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        if _file(module) is not None:
            _follow(module, parts[0], files)
            break
    return _digest(files.values()) if files else None


def _digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


@cache
def _our_files() -> frozenset[Path]:
    files: set[Path] = set()
    for name in _OURS:
        spec = _spec(name)
        assert spec is not None
        if spec.origin is not None:  # kernels has no file of its own
            files.add(Path(spec.origin))
        for folder in spec.submodule_search_locations or ():
            for pattern in ("*.py", "*.json"):  # of kernels, what was tuned for a GPU
                files.update(Path(folder).rglob(pattern))
    return frozenset(files)


def _follow(module: str, package: str, files: dict[str, Path]) -> None:
    """Add a module and what it imports of the user's own; `package` is that, wherever it lies."""
    outermost = module.partition(".")[0]
    if module in files or (outermost != package and _is_library(outermost)):
        return
    file = _file(module)
    if file is None or file in _our_files():
        return
    files[module] = file
    for name in _imported(module, file):
        _follow(name, package, files)


def _imported(module: str, file: Path) -> Iterator[str]:
    """The modules that a file names, each after the packages around it."""
    inside = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it will be told
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level and inside:
                base = resolve_name("." * node.level + base, inside)
            yield from _with_packages(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _with_packages(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[:cut]) for cut in range(1, len(parts) + 1))


def _is_library(package: str) -> bool:
    """Whether it was installed, or came with Python."""
    spec = _spec(package)
    if spec is None or spec.origin is None:
        return False
    return any(Path(spec.origin).is_relative_to(library) for library in _LIBRARIES)


def _file(module: str) -> Path | None:
    """Where a module's source lies; None where there is none."""
    spec = _spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _spec(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except Exception:  # there is none, or a package around it raises what it likes
        return None
