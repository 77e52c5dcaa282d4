"""The errors of the core, and the checks that raise them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from difflib import get_close_matches
from inspect import signature
from math import isfinite
from numbers import Integral, Real
from typing import Any


class PagedsimError(Exception):
    """Base of every error that pagedsim raises on purpose; its text is one line."""


class ConfigError(PagedsimError, ValueError):
    """A setting that cannot work, found when the object is built."""


class RequestError(PagedsimError, ValueError):
    """A request that is malformed, added twice, or not known."""


class AnswerError(PagedsimError, ValueError):
    """A hook of a component, such as a cost model or a router, returned an invalid value."""


class PolicyError(AnswerError):
    """A policy's hook returned an invalid value."""


class PlanError(PagedsimError, RuntimeError):
    """A plan committed out of turn, or a commit that does not answer its plan."""


class IntegrityError(PagedsimError, AssertionError):
    """`check()` found an invariant broken: a bug of ours or of a policy, never of the input."""


def require_number(
    name: str,
    value: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """`value` as a float; ConfigError unless it is a finite number from `low` to `high`.

    `above` and `below` are bounds that it must not be. NaN and infinity are no such numbers: they
    would make every result NaN, or nothing at all.
    """
    fine = is_number(value) and _within(value, low, high)
    fine = fine and (above is None or value > above) and (below is None or value < below)
    if not fine:
        bounds = _bounds(low, high, above, below)
        raise ConfigError(f"{name}={shown(value)}: must be a number{bounds}")
    return float(value)


def require_whole(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int; ConfigError unless it is a whole number from `low` to `high`."""
    if not is_whole(value) or not _within(value, low, high):
        bounds = _bounds(low, high)
        raise ConfigError(f"{name}={shown(value)}: must be a whole number{bounds}")
    return int(value)


def require_flag(name: str, value: Any) -> bool:
    """`value` as it is; ConfigError unless it is a bool: a word such as "no" would be true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: must be true or false")
    return value


def is_number(value: object) -> bool:
    """Whether it is a finite number; true and false are none."""
    try:
        return type(value) is not bool and isinstance(value, Real) and isfinite(value)
    except OverflowError:  # an int beyond what a float holds
        return False


def is_whole(value: object) -> bool:
    """Whether it is a whole number; true and false are none."""
    return type(value) is not bool and isinstance(value, Integral)


def shown(value: object) -> str:
    """A value as it would be written in a configuration, so that texts differ from numbers."""
    return repr(value) if isinstance(value, str) else " ".join(str(value).split())


def plain(answer: Any) -> Any:
    """NumPy's scalars as Python's own; everything else as it is."""
    of_numpy = type(answer).__module__ == "numpy" and getattr(answer, "shape", None) == ()
    return answer.item() if of_numpy else answer


def lacking(abstract: Any) -> str:
    """What is wrong with an abstract class where one of its own is wanted."""
    return f"is abstract; a class must define {', '.join(sorted(abstract.__abstractmethods__))}"


_LONGEST = 120
"""Characters of a return value that an error prints."""


def printed(answer: object) -> str:
    """A return value of user code as an error prints it: one line, of bounded length."""
    try:
        text = " ".join(repr(answer).split())
    except Exception as error:
        text = f"{type(answer).__name__} object, whose repr raises {type(error).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _bounds(
    low: float | None,
    high: float | None,
    above: float | None = None,
    below: float | None = None,
) -> str:
    """What is allowed, behind "a number"."""
    if low is not None and high is not None:
        return f" from {_plain(low)} to {_plain(high)}"
    words = {"of at least": low, "above": above, "at most": high, "below": below}
    stated = [f"{word} {_plain(bound)}" for word, bound in words.items() if bound is not None]
    return f" {', '.join(stated)}" if stated else ""


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist."""
    return ConfigError(f"unknown {kind} {name!r}: {choices(name, known)}")


def not_installed(what: str, extra: str, *packages: str | None) -> ConfigError:
    """The error for packages that `what` needs and that are missing; `extra` installs them."""
    which = f"{' and '.join(map(str, packages))}, which {'is' if len(packages) == 1 else 'are'}"
    install = f"pip install -c constraints.txt '.[{extra}]'"
    return ConfigError(f"{what}: needs {which} not installed: {install}")


def choices(name: str, known: Iterable[str]) -> str:
    """The names to choose from instead of an unknown one, the nearest first."""
    names = sorted(set(known))
    lower = {name.lower(): name for name in names}
    close = get_close_matches(name.lower(), lower, n=1)
    hint = f"did you mean {lower[close[0]]!r}? " if close else ""
    quoted = (repr(name) if "," in name else name for name in names)  # else it would read as two
    return f"{hint}choose from {', '.join(quoted)}"


def unknown_client(where: str, client: str, clients: Iterable[str]) -> ConfigError:
    """The error for a client at `where` that the workload does not have."""
    known = sorted(filter(None, set(clients)))
    instead = choices(client, known) if known else "it has none with a name"
    return ConfigError(f"{where}: no such client in the workload; {instead}")


def refuse_settings(
    what: str,
    given: Iterable[str],
    maker: Callable[..., Any],
    where: str = "",
    hidden: Container[str] = (),
    beside: Collection[str] = (),
) -> None:
    """Raise ConfigError for a setting that `maker` does not accept, or a missing one.

    `maker` builds `what` from the settings under `where`. `hidden` parameters are set elsewhere, so
    errors do not offer them, but they do offer settings `beside` those of `maker`.
    """
    inside, names = f"{where}." if where else "", set(given)
    parameters = signature(maker).parameters.values()
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in given:
        if key not in named and not takes_any:
            settings = [name for name in named if name not in hidden]
            # One of those beside is meant as it is: none of the others is like it.
            offered, like = (settings, "") if key in beside else ([*settings, *beside], key)
            instead = choices(like, offered) if offered else "it takes none"
            raise ConfigError(f"{inside}{key}: no such setting of {what}; {instead}")
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in names:
            raise ConfigError(f"{inside}{key}: must be given, for {what}")


def raised(error: BaseException, but: str = "") -> str:
    """An error of a user's code in one line, with the last place outside pagedsim, or else the last
    one; frames of the file `but` are passed over."""
    text = " ".join(str(error).split())
    trace, place, among_ours = error.__traceback__, "", True
    while trace is not None:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__"))
        ours = module.partition(".")[0] == "pagedsim"
        file = code.co_filename
        named = not (file.startswith("<") or file.endswith((".pyx", ".pxi"))) and file != but
        if named and (among_ours or not ours):
            place, among_ours = f" ({file}:{trace.tb_lineno})", ours
        trace = trace.tb_next
    if isinstance(error, (ImportError, SyntaxError)):
        place = ""  # the text says where
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"
