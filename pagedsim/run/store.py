"""Complete runs on disk, and the recipe that decides whether one is reused.

A study that is started again goes on where it ended: a run is reused where its recipe is the same,
which is the configuration, the simulator's code, and the code and files that the configuration
names.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from inspect import getsource, unwrap
from pathlib import Path
from types import CodeType
from typing import Any
from uuid import uuid4

import pagedsim
from pagedsim.metrics.arms import Run
from pagedsim.metrics.catalogue import lacks_percentiles
from pagedsim.metrics.definitions import METRICS
from pagedsim.metrics.files import SUMMARY, read_json, read_summary, write_json
from pagedsim.report.plots import PLOTS
from pagedsim.run.job import Job
from pagedsim.run.provenance import made_by
from pagedsim.spec.given import written
from pagedsim.spec.objects import classes_in, is_library_file, script
from pagedsim.spec.roots import OF_THE_STUDY

_NAME = "run.json"
_COMMIT = "commit"
"""A key of run.json alone: another commit with the same code gives the same run."""

_SUMMARY = "summary_digest"
"""The key of a digest of the summary, beside which one of another content is no complete run."""

Recipe = dict[str, Any]
"""All that decides what comes out of a run."""


class Store(ABC):
    """What remains of a run."""

    def stored(self, job: Job, recipe: Recipe) -> Run | None:
        """The run as it was left, if it is complete and made of the same."""
        try:
            summary = self.summary(job, recipe)
        except (OSError, ValueError, TypeError):  # not there, or not whole
            return None
        if summary is None or lacks_percentiles(summary, job.config.get("study")):
            return None
        return Run(job.arm, job.number, job.folder, job.config, summary)

    @abstractmethod
    def summary(self, job: Job, recipe: Recipe) -> dict[str, Any] | None:
        """That of the run as it was left, if it is made of the same."""

    def forget(self, job: Job) -> None:
        """What is in the folder is about to be written over."""
        (job.folder / _NAME).unlink(missing_ok=True)

    @abstractmethod
    def store(self, job: Job, recipe: Recipe, run: Run) -> bool:
        """Mark the run as complete, unless what it was made of has changed meanwhile.

        `recipe` is that from before the run. Which code ran is not known where it was
        edited since, so such a run is made again when the study is resumed.
        """


class Tables(Store):
    """A folder a run: its tables, its summary, and in run.json what it was made from."""

    def summary(self, job: Job, recipe: Recipe) -> dict[str, Any] | None:
        record = json.loads((job.folder / _NAME).read_text(encoding="utf-8"))
        digest = record.pop(_SUMMARY, None) if isinstance(record, dict) else None
        same = {**record, _COMMIT: None} == {**recipe, _COMMIT: None}
        return read_summary(job.folder) if same and digest == _stored_as(job) else None

    def store(self, job: Job, recipe: Recipe, run: Run) -> bool:
        if recipe_of(job) != recipe:
            return False
        record = {**recipe, **made_by(), _SUMMARY: _stored_as(job)}
        text = json.dumps(record, indent=2, sort_keys=True)
        (job.folder / _NAME).write_text(text + "\n", encoding="utf-8")
        return True


class Summaries(Store):
    """A file a run, so that a search of hundreds stays small: its summary, and a digest."""

    def summary(self, job: Job, recipe: Recipe) -> dict[str, Any] | None:
        record: Any = read_json(_summary_file(job))
        if not isinstance(record, dict) or record.get("made_of") != _digest_of(recipe):
            return None
        summary = record.get("summary")
        return summary if record.get(_SUMMARY) == _digest_of(summary) else None

    def store(self, job: Job, recipe: Recipe, run: Run) -> bool:
        """Put a file in the place of the folder, whose tables come back when the run is typed."""
        same = recipe_of(job) == recipe
        if same:
            kept = {"made_of": _digest_of(recipe), "made_by": made_by(), "summary": run.summary}
            write_json(file := _summary_file(job), kept, ordered=True)
            kept[_SUMMARY] = _digest_of(read_json(file)["summary"])  # as it will be read again
            write_json(file, kept, ordered=True)
        shutil.rmtree(job.folder, ignore_errors=True)  # it may be asked twice
        return same


def recipe_of(job: Job) -> Recipe:
    """What `job` is made of, as it is now."""
    given = {key: value for key, value in job.config.items() if key not in OF_THE_STUDY}
    config = written(given)
    parts = {
        "version": pagedsim.__version__,
        "seed": job.seed,
        "config": config,
        "simulator": of_the_simulator(),
        "code": {
            **{path: of_target(path) for path in sorted({path for _, path in classes_in(given)})},
            **{module: of_target(f"{module}.*") for module in given.get("plugins", ())},
        },
        "files": {path: _stamp(path) for path in sorted(set(_named(config, "path", "config")))},
    }
    return json.loads(json.dumps(parts, default=str))


def _named(value: Any, *keys: str) -> Iterator[str]:
    """The texts under `keys`, however deep."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in keys:
                every = inner if isinstance(inner, (list, tuple)) else [inner]
                yield from (text for text in every if isinstance(text, str))
            yield from _named(inner, *keys)


def _stamp(path: str) -> list[int] | None:
    """Size and time of a file: whether it was changed."""
    try:
        state = Path(path).expanduser().stat()
    except OSError:
        return None
    return [state.st_size, state.st_mtime_ns]


def _summary_file(job: Job) -> Path:
    return job.folder.with_name(f"{job.folder.name}.json")


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _stored_as(job: Job) -> str:
    """A digest of the summary in a run's folder."""
    return hashlib.sha256((job.folder / SUMMARY).read_bytes()).hexdigest()


# -- the code that a run comes from ----------------------------------------------------------------

_OURS = (
    *("pagedsim.core", "pagedsim.build", "pagedsim.server", "pagedsim.sim", "pagedsim.cluster"),
    *("pagedsim.workload", "pagedsim.metrics", "pagedsim.engine", "pagedsim.kernels"),
    "pagedsim.policies",
    *("pagedsim.backends.base", "pagedsim.run.job", "pagedsim.spec.objects", "pagedsim.run.parts"),
    *("pagedsim.spec.run", "pagedsim.spec.given"),
    *("pagedsim.backends.sim", "pagedsim.backends.engine"),
    *("pagedsim.fidelity.engine_model", "pagedsim.fidelity.sheets"),
)
"""What simulates, serves and measures. Reports, pictures and the front door change no run."""
_THIS_PROCESS = uuid4().hex


@cache
def of_the_simulator() -> str:
    """A digest of all our code that decides what comes out of a run, as it was when first asked."""
    return _digest(_our_files())


def of_target(path: str) -> str | None:
    """A digest of the user's code behind a dotted path: its module, and what that imports.

    None where all of it is ours, or where there is no such module.
    """
    if path.startswith("__main__.") and _source("__main__") is None:
        return _of_notebook(path.rpartition(".")[2])
    files: dict[str, Path] = {}
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        if _source(module) is not None:
            _follow(module, parts[0], files)
            break
    return _digest(files.values()) if files else None


def _of_notebook(name: str) -> str:
    """A digest of a class without a file, or (`*`) of the metrics and plots that are typed in: of
    the source, or else of the code."""
    main = vars(sys.modules["__main__"])
    parts = _registered("__main__") if name == "*" else [main[name]] if name in main else []
    try:
        text = "".join(map(_source_of, parts))
    except (OSError, TypeError):
        text = repr([_code_of(part) for part in parts])
    return hashlib.sha256((text if parts else _THIS_PROCESS).encode()).hexdigest()[:16]


def _source_of(part: Any) -> str:
    """The source of a class or function. Raises OSError or TypeError where it is not known."""
    # Under Python 3.13 `python -c` gives lines of its script for whatever it executes.
    if getattr(getattr(part, "__code__", None), "co_filename", "") == "<string>":
        raise OSError("without a file")
    return getsource(part)


def _registered(module: str) -> list[Any]:
    """The metrics and plots that a module has registered."""
    every = [*(part.of for part in METRICS.values()), *map(unwrap, PLOTS.values())]
    return [part for part in every if part.__module__ == module]


def _code_of(part: Any) -> Any:
    """What a class, function or constant does, without the addresses of what it holds."""
    if isinstance(part, CodeType):
        return part.co_code, part.co_names, [_code_of(inner) for inner in part.co_consts]
    if isinstance(part, type):
        return [(name, _code_of(inner)) for name, inner in sorted(vars(part).items())]
    if code := getattr(unwrap(part) if callable(part) else part, "__code__", None):
        return _code_of(code)
    return part if isinstance(part, str | bytes | int | float | tuple | None) else type(part)


def _digest(files: Iterable[Path]) -> str:
    """Of their contents alone: an installation has the same files in other folders."""
    contents = sorted(hashlib.sha256(file.read_bytes()).digest() for file in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


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
    file = _source(module)
    if file is None or file in _our_files():
        return
    files[module] = file
    for name in _imported(module, file, file.stat().st_mtime_ns):
        _follow(name, package, files)


@cache
def _imported(module: str, file: Path, changed: int) -> tuple[str, ...]:
    """The modules that a file named when it was `changed` last, each after the packages around it:
    every run of a study asks for the same ones."""
    return tuple(dict.fromkeys(_names_in(module, file)))


def _names_in(module: str, file: Path) -> Iterator[str]:
    inside = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # the import reports it
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
    return is_library_file(Path(spec.origin))


def _source(module: str) -> Path | None:
    """Where a module's source lies; None where there is none."""
    if module == "__main__":  # whose module has no spec
        return script()
    spec = _spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _spec(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except Exception:  # there is none, or a package around it raises what it likes
        return None
