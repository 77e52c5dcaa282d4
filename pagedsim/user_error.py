"""Errors as one clear line: what is wrong, where, and what is allowed instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pagedsim.core import PagedsimError

_VERBOSE = "hydra.verbose=true"


class UserError(PagedsimError):
    """What went wrong, a line each."""

    def __init__(self, lines: Sequence[str], expected: bool = True) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines
        self.expected = expected


class Interruption(KeyboardInterrupt):
    """A Ctrl-C that left something; its text says what."""


def guarded(body: Callable[[], None]) -> int:
    """Call what a command does, with an error as one line on stderr; returns the exit code.

    With `hydra.verbose=true` on the command line it is raised as it is.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to here
    try:
        body()
    except KeyboardInterrupt as error:
        _say(f"interrupted: {error}" if str(error) else "interrupted")
        return 130
    except UserError as error:
        for text in error.lines:
            _say(text)
        _offer_traceback(error.expected)
        return 1
    except Exception as error:
        if verbose():
            raise
        _say(line(error))
        _offer_traceback(expected(error))
        return 1
    return 0


def verbose() -> bool:
    """Whether tracebacks are wanted."""
    return any(word.lower() == _VERBOSE for word in sys.argv[1:])


def shown(path: Path) -> str:
    """A path from here, where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _say(text: str) -> None:
    print(f"pagedsim: {text}", file=sys.stderr)


def _offer_traceback(expected: bool) -> None:
    if not expected and not verbose():
        _say(f"add {_VERBOSE} for the traceback")


def expected(error: BaseException) -> bool:
    """Whether an error is about the input, rather than a fault of the program."""
    return any(isinstance(link, (PagedsimError, OSError)) for link in _chain(error))


def line(error: BaseException) -> str:
    """One line for an error."""
    for link in _chain(error):
        if isinstance(link, PagedsimError):
            return str(link)
    for link in _chain(error):
        if isinstance(link, OSError):
            return f"{link.filename or 'file'}: {link.strerror or link}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from, the innermost last."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__
