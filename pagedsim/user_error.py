"""Errors as one clear line: what is wrong, where, and what is allowed instead."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pagedsim.core import PagedsimError
from pagedsim.core.errors import choices

_VERBOSE = "hydra.verbose=true"
_GROUP_TYPE = "Config group override must be"
"""How Hydra begins when a group is set to null or a number."""
_KINDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


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
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
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
    text = str(error)
    if options := getattr(error, "options", None):
        group, _, name = str(getattr(error, "missing_cfg_file", "")).rpartition("/")
        return f"{group}={name}: unknown; {choices(name, options)}"
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
        return f"{word}: cannot be read as key=value{syntax(word)}"
    return _flat(error)


def reason(error: BaseException | None) -> str:
    """Why a value does not go where it was put."""
    text = str(error).splitlines()[0] if error else "does not fit"
    if "is not Optional" in text:
        return "must be given"
    if "is not a valid bool" in text:
        return f"must be {_KINDS['Boolean']}"
    if re.match(r"Cannot assign \w+ to Dict", text):
        return "must be a mapping, such as {name: {key: value}}"
    if match := re.search(r"could not be converted to (\w+)", text):
        return f"must be {_KINDS.get(match[1], f'a {match[1]}')}"
    return text


def syntax(word: str) -> str:
    """A hint to what is mostly the reason, where a word was not understood."""
    above, dot, name = word.partition("=")[0].lstrip("+").rpartition(".")
    if dot and " " in name:
        return f"; a name with a space goes into a mapping: '++{above}={{{name}: ...}}'"
    if re.search(r"[=;&#<>!^`()]", word.partition("=")[2]):
        return "; a text with special signs takes quotes of its own: 'key=\"a=b\"', '[\"a=b\"]'"
    return ""


# -- what there would have been to choose from -----------------------------------------------------


def no_key(key: str, root: Any) -> str:
    """A key that a configuration does not have: which part of it, and what there is beside that."""
    names = key.split(".")
    if names[0] == "hydra":
        return f"{key}: no such key of Hydra's; --cfg hydra shows them"
    node = root
    for depth, name in enumerate(names):
        there = [str(one) for one in node] if isinstance(node, dict) else []
        if name not in there:
            where = _dotted(names[: depth + 1])
            return f"{where}: no such {_instead(names[: depth + 1], root, there)}"
        node = node[name]
    return f"{key}: no such key"


def _instead(names: Sequence[str], root: Any, there: Sequence[str]) -> str:
    """What to do, where the last of `names` is not `there` beside the others."""
    *above, name = names
    if above == ["study", "arms"]:
        return "arm: an experiment's arms stand as they are; choose experiment=compare for others"
    if names == ["fleet", "link", "lanes"]:
        return "key; it is now called 'channels'"
    if names == ["workload", "requests"] and "sessions" in there:
        return "key; use workload.sessions="  # the root's `requests` is a log of them
    if len(above) == 1 and name in root and names != ["router", "seed"]:  # which draws nothing
        return f"key; use {name}="
    sections = [key for key, one in root.items() if isinstance(one, dict) and name in one]
    if not above and len(sections) == 1 and name.strip("_") == name:
        return f"key; use {sections[0]}.{name}="
    known = [one for one in there if not one.startswith("_")]
    if above == ["fleet", "autoscale"]:  # null where it is off
        return "key by itself; set all, fleet.autoscale={rule: queue, up: 4, down: 1, ...}"
    text = f"key; {choices(name, known) if known else f'there are none below {_dotted(above)}'}"
    # What the class behind a group takes besides is added, where it was not a slip.
    takes_more = above[:1] == ["policy"] or above == ["slo", "clients"]
    takes_more |= above[:1] == ["workload"] and len(above) > 1
    if takes_more and not get_close_matches(name, known):
        text += f"; +{_dotted(names)}=... adds it"
    return text


def _dotted(names: Sequence[str]) -> str:
    return ".".join(names)


def _composed(words: Sequence[str], base: str) -> Any:
    """The configuration as the group choices among `words` make it, or else the default."""
    from omegaconf import OmegaConf

    from pagedsim.run.options import Options

    choices = [word for word in words if re.fullmatch(r"[a-z]+=[\w./-]+", word)]
    for overrides in (choices, []):
        try:
            return OmegaConf.to_container(Options().compose(base, overrides).config)
        except Exception:
            continue
    return {}


def _not_an_option(words: Sequence[str]) -> str:
    """The first group among `words` that is set to what can be no option's name."""
    from pagedsim.run.options import Options

    available = Options()
    for word in words:
        group, _, name = word.partition("=")
        options = available.options_of(group) if group.isidentifier() else []
        if options and name not in options:
            return f"{word}: unknown; {choices(name, options)}"
    return ""
