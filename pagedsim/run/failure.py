"""Why a run failed: one line for everybody, the traceback for who asks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from pagedsim.core import PagedsimError
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
    files = dict(_files(config))
    places = list(_places(error))
    for code, line in reversed(places):
        if setting := files.get(code.co_filename):
            return Failure(f"{setting} failed: {what} ({_at(code, line)})", trace, False, when)
    where = f" ({_at(*places[-1])})" if places else ""
    return Failure(what + where, trace, False, when)


def _files(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The files of those that decide in a run, and the setting that chose each."""
    for group in ("router", "policy"):
        settings = config.get(group)
        target = str(settings.get("_target_", "")) if isinstance(settings, Mapping) else ""
        module = sys.modules.get(target.rpartition(".")[0])
        if file := getattr(module, "__file__", None):
            yield file, f"{group}={target}"


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
