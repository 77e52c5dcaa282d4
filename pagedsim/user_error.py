"""Errors as one clear line: what is wrong, where, and what is allowed instead."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pagedsim.core import PagedsimError

_VERBOSE = "hydra.verbose=true"
_GROUP_TYPE = "Config group override must be"
"""How Hydra begins when a group is set to null or a number."""


class UserError(PagedsimError):
    """What went wrong, a line each."""

    def __init__(self, lines: Sequence[str], expected: bool = True) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines
        self.expected = expected


class Interruption(KeyboardInterrupt):
    """A Ctrl-C that left something; its text says what."""


def guarded(run: Callable[[], None], root: str = "config") -> int:
    """Call `run`; an error becomes one line on stderr and exit code 1.

    With `hydra.verbose=true` on the command line it is raised as it is. `root` is the configuration
    that the words are of.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to here
    try:
        run()
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
        _say(line(error, root=root))
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
    if _GROUP_TYPE in str(error):
        return True
    kinds = (PagedsimError, OSError)
    return any(isinstance(link, kinds) or _hydras(link) for link in _chain(error))


def line(error: BaseException, overrides: Sequence[str] | None = None, root: str = "config") -> str:
    """One line for an error; `overrides` are those it came from (default: the command line's), and
    `root` is what they are of."""
    words = sys.argv[1:] if overrides is None else overrides
    for link in _chain(error):
        if isinstance(link, PagedsimError):
            return str(link)
    for link in _chain(error):
        if _hydras(link) and (text := _composition(link, words, root)):
            return text
    if _GROUP_TYPE in str(error) and (text := _not_an_option(words)):
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


def _composition(error: BaseException, words: Sequence[str], root: str) -> str:
    """What Hydra could not compose, in our words."""
    from pagedsim.options import no_forced_option, no_key, not_there, reason

    text = str(error)
    if options := getattr(error, "options", None):
        group, _, name = str(getattr(error, "missing_cfg_file", "")).rpartition("/")
        return f"{group}={name}: unknown; {not_there(group, name, options)}"
    if getattr(error, "missing_cfg_file", None) and (known := _not_an_option(words)):
        return known
    if match := re.search(r"Could not override '([^']+)'", text):
        # A mapping given as a whole is refused for one of its keys, which only the cause names.
        key = getattr(error.__cause__, "full_key", None) or match[1]
        return no_key(key, _composed(words, root))
    if match := re.search(r"Could not delete from config\. '([^']+)'", text):
        return f"~{match[1]}: cannot be taken away: it is not there, or null already"
    if match := re.match(r"Error merging override (.+)", text):
        return f"{match[1].strip()}: {reason(error.__cause__)}"
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        key, _, values = match[1].partition("=")
        each = "-m tries each; " if root == "config" else ""
        return f"{match[1]}: several values: {each}a list is written {key}=[{values}]"
    if "Missing mandatory value" in text:
        key = getattr(error, "full_key", None) or text.rpartition(" ")[2]
        return f"{key}: must be given: {key}=..."
    if type(error).__name__ == "OverrideParseException":
        word = str(getattr(error, "override", text))
        return f"{word.strip() or repr(word)}: cannot be read as key=value{_syntax(text, word)}"
    if match := re.search(r"force-add of config groups is not supported: '(.+)'", text):
        return no_forced_option(match[1])
    if match := re.search(r"Interpolation key '([^']+)' not found", text):
        at = _at(error, words)
        known = "no such key" if "${." in at else no_key(match[1], _composed(words, root))
        return f"{at}: {known}"
    first = text.partition("\n")[0]
    if match := re.search(r"interpolation: \"?(.+?)\"?$|^\w+ interpolation.*", first):
        return f"{_at(error, words)}: {match[1] or match[0]}"
    return _flat(error)


def _at(error: BaseException, words: Sequence[str]) -> str:
    """The key whose value names others by ${...}, and the value."""
    if key := getattr(error, "full_key", None):
        return f"{key}={getattr(error, 'child_node', '')}"
    return next((word for word in words if "${" in word), "${...}")


def _syntax(text: str, word: str) -> str:
    """A hint to what is mostly the reason, where a word was not understood."""
    from pagedsim.overrides import hint

    return hint(word, special="no viable alternative" in text)


def _composed(words: Sequence[str], base: str) -> Any:
    """The configuration as the group choices among `words` make it, or else the default."""
    from omegaconf import OmegaConf

    from pagedsim.options import Options

    choices = [word for word in words if re.fullmatch(r"[a-z]+=[\w./-]+", word)]
    for overrides in (choices, []):
        try:
            return OmegaConf.to_container(Options().compose(base, overrides).config)
        except Exception:
            continue
    return {}


def _not_an_option(words: Sequence[str]) -> str:
    """The first group among `words` that is set to what can be no option's name."""
    from pagedsim.options import Options, not_there

    available = Options()
    for word in words:
        group, _, name = word.partition("=")
        options = available.options_of(group) if group.isidentifier() else []
        if options and name not in options:
            return f"{word}: unknown; {not_there(group, name, options)}"
    return ""
