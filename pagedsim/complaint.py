"""Errors as one clear line: what is wrong, where, and what is allowed instead."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches

VERBOSE = "hydra.verbose=true"


def guarded(run: Callable[[], None]) -> int:
    """Call `run`; an error becomes one line on stderr and exit code 1.

    With `hydra.verbose=true` on the command line it is raised as it is.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to here
    try:
        run()
    except KeyboardInterrupt:
        print("pagedsim: interrupted before anything was finished", file=sys.stderr)
        return 130
    except Exception as error:
        if VERBOSE in sys.argv[1:]:
            raise
        print(f"pagedsim: {line(error)}", file=sys.stderr)
        if not expected(error):
            print(f"pagedsim: add {VERBOSE} for the traceback", file=sys.stderr)
        return 1
    return 0


def expected(error: BaseException) -> bool:
    """Whether an error is about the input, rather than a fault of the program."""
    return any(_ours(link) or _hydras(link) or isinstance(link, OSError) for link in _chain(error))


def line(error: BaseException) -> str:
    """One line for an error."""
    for link in _chain(error):
        if _ours(link):
            return str(link)
    for link in _chain(error):
        if _hydras(link) and (text := _composition(link)):
            return text
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


def _ours(error: BaseException) -> bool:
    from pagedsim.core import PagedsimError

    return isinstance(error, PagedsimError)


def _hydras(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in ("hydra", "omegaconf")


def _composition(error: BaseException) -> str:
    """What Hydra could not compose, in our words."""
    text = str(error)
    if options := getattr(error, "options", None):
        group, _, name = str(getattr(error, "missing_cfg_file", "")).rpartition("/")
        return f"{group}={name}: unknown; {_choices(name, options)}"
    if match := re.search(r"Could not override '([^']+)'\.? ?No match in the defaults list", text):
        name = match[1]
        return f"{name}: no such group; {_choices(name, _keys(''))}"
    if match := re.search(r"Could not override '([^']+)'", text):
        parent, _, name = match[1].rpartition(".")
        return f"{match[1]}: no such key; {_choices(name, _keys(parent))}"
    if text.startswith("Error merging override") and error.__cause__:
        reason = str(error.__cause__).splitlines()[0]
        return f"{text.removeprefix('Error merging override ').strip()}: {reason}"
    return " ".join(text.split())


def _choices(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}choose from {', '.join(names)}"


def _keys(parent: str) -> list[str]:
    """The keys below `parent` in the configuration, as the group choices given make it."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    choices = [word for word in sys.argv[1:] if re.fullmatch(r"[a-z]+=[\w./-]+", word)]
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
