"""Errors as one clear line: what is wrong, where, and what is allowed instead."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from pagedsim.core import PagedsimError

_VERBOSE = "hydra.verbose=true"
_KINDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


class Complaint(PagedsimError):
    """What went wrong, a line each; `study` is what there is nevertheless."""

    def __init__(self, lines: Sequence[str], expected: bool = True, study: Any = None) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines
        self.expected = expected
        self.study = study


class Interruption(KeyboardInterrupt):
    """A Ctrl-C that left something; its text says what."""

    def __init__(self, text: str, study: Any = None) -> None:
        super().__init__(text)
        self.study = study


def guarded(run: Callable[[], None]) -> int:
    """Call `run`; an error becomes one line on stderr and exit code 1.

    With `hydra.verbose=true` on the command line it is raised as it is.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to here
    try:
        run()
    except KeyboardInterrupt as error:
        _say(f"interrupted: {error}" if str(error) else "interrupted before any run was complete")
        return 130
    except BrokenPipeError:  # whoever was reading has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Complaint as error:
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


def _say(text: str) -> None:
    print(f"pagedsim: {text}", file=sys.stderr)


def _offer_traceback(expected: bool) -> None:
    if not expected and not verbose():
        _say(f"add {_VERBOSE} for the traceback")


def expected(error: BaseException) -> bool:
    """Whether an error is about the input, rather than a fault of the program."""
    kinds = (PagedsimError, OSError)
    return any(isinstance(link, kinds) or _hydras(link) for link in _chain(error))


def line(error: BaseException, overrides: Sequence[str] | None = None) -> str:
    """One line for an error; `overrides` are those it came from (default: the command line's)."""
    words = sys.argv[1:] if overrides is None else overrides
    for link in _chain(error):
        if isinstance(link, PagedsimError):
            return str(link)
    for link in _chain(error):
        if _hydras(link) and (text := _composition(link, words)):
            return text
    for link in _chain(error):
        if isinstance(link, OSError):
            return f"{link.filename or 'file'}: {link.strerror or link}"
    return f"{type(error).__name__}: {_flat(error)}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from, the innermost last."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _hydras(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in ("hydra", "omegaconf")


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split())


def _composition(error: BaseException, words: Sequence[str]) -> str:
    """What Hydra could not compose, in our words."""
    text = str(error)
    if options := getattr(error, "options", None):
        group, _, name = str(getattr(error, "missing_cfg_file", "")).rpartition("/")
        return f"{group}={name}: unknown; {_choices(name, options)}"
    if match := re.search(r"Could not override '([^']+)'\.? ?No match in the defaults list", text):
        return f"{match[1]}: no such group; {_choices(match[1], _keys('', words))}"
    if match := re.search(r"Could not (?:override|delete from config\S*) '([^']+)'", text):
        parent, _, name = match[1].rpartition(".")
        known = _keys(parent, words)
        if not known:
            return f"{match[1]}: no such key: {parent or 'the configuration'} has none below it"
        return f"{match[1]}: no such key; {_choices(name, known)}"
    if match := re.match(r"Error merging override (.+)", text):
        return f"{match[1].strip()}: {_reason(error.__cause__)}"
    if match := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{match[1]}: must be given: {match[1]}=..."
    if type(error).__name__ == "OverrideParseException":
        override = str(getattr(error, "override", ""))
        return f"{override}: cannot be read as key=value{_syntax(text)}"
    return _flat(error)


def _reason(error: BaseException | None) -> str:
    """Why a value does not go where it was put."""
    text = str(error).splitlines()[0] if error else "does not fit"
    if match := re.search(r"could not be converted to (\w+)", text):
        return f"must be {_KINDS.get(match[1], f'a {match[1]}')}"
    if match := re.search(r"Incompatible value '.*' for field of type '(\w+)'", text):
        return f"must be {_KINDS.get(match[1].capitalize(), f'a {match[1]}')}"
    return text


def _syntax(text: str) -> str:
    """Where reading stopped, and a hint to what is mostly the reason."""
    if match := re.search(r"'(.*)'$", text.splitlines()[0]):
        stop = match[1].replace("<EOF>", "the end")
        return f", from {stop!r} on; texts with special signs take quotes: 'key=\"a=b\"'"
    return ""


def _choices(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}choose from {', '.join(names)}"


def _keys(parent: str, words: Sequence[str]) -> list[str]:
    """The keys below `parent` in the configuration, as the group choices given make it."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    choices = [word for word in words if re.fullmatch(r"[a-z]+=[\w./-]+", word)]
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        for overrides in (choices, []):
            try:
                config = compose("config", overrides=overrides)
            except Exception:
                continue
            node = OmegaConf.select(config, parent) if parent else config
            return [str(key) for key in node] if OmegaConf.is_dict(node) else []
    return []
