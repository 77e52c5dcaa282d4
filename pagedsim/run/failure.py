"""Why a run failed: one line for everybody, the traceback for who asks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from pagedsim.core import PagedsimError
from pagedsim.run.objects import locate
from pagedsim.user_error import UserError, verbose


@dataclass(frozen=True)
class Failure:
    """A run that failed."""

    reason: str
    """The same for all that failed alike."""
    trace: str = ""
    expected: bool = True
    """Whether the reason says it all; if not, somebody will want the traceback."""
    when: str = ""

    def __str__(self) -> str:
        return self.reason + self.when


def error_of(failures: Mapping[str, Failure]) -> UserError:
    """A line for each failure, after whose it is; `hydra.verbose=true` prints tracebacks, too."""
    if verbose():
        for failure in failures.values():
            print(failure.trace, end="", file=sys.stderr)
    lines = lines_of(failures)
    expected = all(failure.expected for failure in failures.values())
    return UserError(lines, expected=expected)


def lines_of(failures: Mapping[str, Failure]) -> list[str]:
    """A line for each, after whose it is."""
    return [f"{whose}: {one}" if whose else str(one) for whose, one in failures.items()]


def failure_of(error: BaseException, config: Mapping[str, Any], now: float | None) -> Failure:
    """An error under a configuration as a failure; `now`: the simulated time at which it came, if
    any had passed."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, PagedsimError):
        return Failure(str(error), trace)
    if isinstance(error, MemoryError):
        return Failure("there is not enough memory on this machine; simulate less", trace)
    what = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    when = "" if now is None else f" at {now:.6g} s of simulated time"
    places = list(_places(error))
    parts = list(_parts(config))
    for place in reversed(places):
        if part := _owner(parts, place[0]):
            text = f"{part.setting} failed: {what} ({_within(part, places, place)})"
            return Failure(text, trace, False, when)
    where = f" ({_at(*places[-1])})" if places else ""
    return Failure(what + where, trace, False, when)


@dataclass(frozen=True)
class _Part:
    """A part of a run that users may write, and where its code is."""

    setting: str
    classes: Mapping[str, str]
    """Its class and those that it derives from, ours left out: qualified names, and their files."""

    @property
    def files(self) -> Collection[str]:
        return self.classes.values()


def _parts(config: Mapping[str, Any]) -> Iterator[_Part]:
    """The parts of a configuration whose code is not ours, and those of `policies`."""
    for setting, path in _paths(config):
        if path.split(".")[0] in ("pagedsim", "experiments"):
            continue
        try:
            made = locate(path)
        except PagedsimError:
            continue  # it was never made
        kinds = [made, *(kind for kind in getattr(made, "__mro__", ()) if _foreign(kind))]
        names = {getattr(kind, "__qualname__", ""): _file(kind) for kind in kinds}
        files = {name: file for name, file in names.items() if name and file}
        yield _Part(f"{setting}={path}", files)


def _paths(settings: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Settings that name a class by its path, each with the path."""
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        inside = f"{where}.{key}" if where else str(key)
        if isinstance(value, Mapping):
            yield from _paths(value, inside)
        elif isinstance(value, str) and key in ("_target_", "kind", "of") and "." in value:
            yield where if key == "_target_" else inside, value


def _foreign(kind: type) -> bool:
    return kind.__module__.split(".")[0] not in ("pagedsim", "policies", "builtins", "abc")


def _file(made: Any) -> str:
    return getattr(sys.modules.get(str(getattr(made, "__module__", ""))), "__file__", None) or ""


def _owner(parts: Sequence[_Part], code: CodeType) -> _Part | None:
    """The part that a function is of: of several in one file, the one of its class."""
    there = [part for part in parts if code.co_filename in part.files]
    kind = code.co_qualname.rpartition(".")[0]
    of_class = [part for part in there if part.classes.get(kind) == code.co_filename]
    found = of_class or there
    return found[-1] if found else None


def _within(
    part: _Part, places: Sequence[tuple[CodeType, int]], place: tuple[CodeType, int]
) -> str:
    """Where in a part an error was raised, and from which of its hooks."""
    outermost = next(code for code, _ in places if code.co_filename in part.files)
    through = "" if outermost is place[0] else f", called from {outermost.co_name}"
    return _at(*place) + through


def _places(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    """Where it came through, the innermost last; what it was raised from before itself."""
    if error.__traceback__ is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            yield frame.f_code, line
    if error.__cause__ is not None:
        yield from _places(error.__cause__)


def _at(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{shown}:{line}, in {code.co_name}"
