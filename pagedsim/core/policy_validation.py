"""Validation of a policy class (unknown hooks, wrong signatures) and of the values of its hooks."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from inspect import Signature, isdatadescriptor, signature
from numbers import Real
from typing import Any, Final, SupportsFloat, cast, get_args

from pagedsim.core.errors import (
    AnswerError,
    ConfigError,
    PolicyError,
    is_number,
    plain,
    printed,
    require_flag,
)
from pagedsim.core.policy import Need, Policy, PolicyWrapper, Preemption, RankChanges, hook_of

HOOKS = tuple(name for name, hook in vars(Policy).items() if callable(hook) and name[0] != "_")
ATTRIBUTES: Final = ("rank_changes", "needs", "by_client", "sorts_late", "displacing")
"""What a class states of itself."""

LONGEST: Final = 1e9
"""The longest duration in seconds, 32 years; a clock at it still resolves 0.12 µs."""


def validate_policy(policy: Policy) -> None:
    """Raise ConfigError for a class whose hooks would not be called, or not as it expects.

    That is a hook or an attribute with a misspelled name, a hook with other arguments
    than `Policy` has, or an invalid `rank_changes`, `needs` or flag.
    """
    name = type(policy).__name__
    if isinstance(policy, PolicyWrapper):
        if not hasattr(policy, "inner"):
            raise ConfigError(f"{name}.inner: is not set; __init__ must call super().__init__")
        validate_policy(policy.inner)
    if policy.rank_changes not in get_args(RankChanges):
        known = ", ".join(map(repr, get_args(RankChanges)))
        raise ConfigError(f"{name}.rank_changes={policy.rank_changes!r}: must be one of {known}")
    _refuse_attributes(policy)
    own_names = vars(type(policy))
    for method, value in own_names.items():
        if method.startswith("_"):
            continue
        kind = "hook" if callable(value) else "attribute"
        close = _close(method, HOOKS if kind == "hook" else ATTRIBUTES)
        if close not in (None, method) and close not in own_names:
            raise ConfigError(f"{name}.{method}: no such {kind}; did you mean {close!r}?")
    refuse_signatures(policy, Policy)


def _close(name: str, known: tuple[str, ...]) -> str | None:
    """The known name that `name` is, or is a slip of; two letters of a short one may be swapped."""
    swapped = [word for word in known if sorted(word) == sorted(name)]
    return next(iter(swapped or get_close_matches(name, known, 1, cutoff=0.8)), None)


def validate_preemption(preemption: Preemption) -> None:
    """Raise ConfigError for `swaps` that is no bool."""
    require_flag(f"{type(preemption).__name__}.swaps", preemption.swaps)


def _refuse_attributes(policy: Policy) -> None:
    """Raise ConfigError for unknown `needs`, and for flags that are not booleans."""
    name, known = type(policy).__name__, get_args(Need)
    needs: Any = policy.needs
    if not isinstance(needs, (tuple, list, frozenset, set)) or any(n not in known for n in needs):
        raise ConfigError(
            f"{name}.needs={printed(needs)}: must be a tuple of some of "
            f"{', '.join(map(repr, known))}"
        )
    for switch in ("by_client", "sorts_late", "displacing", "walks_tree"):
        value = getattr(policy, switch)
        if value is not None or switch != "displacing":
            require_flag(f"{name}.{switch}", value)


def refuse_signatures(part: object, base: type) -> None:
    """Raise ConfigError for a hook that cannot be called with the arguments of `base`."""
    for hook, stated in vars(base).items():
        override = getattr(type(part), hook, stated)
        if hook.startswith("_") or override is stated:
            continue
        name = f"{type(part).__name__}.{hook}"
        if isdatadescriptor(stated) and callable(override):
            raise ConfigError(f"{name}: must be an attribute or a property, not a method")
        if callable(stated) and not isinstance(stated, type):
            _refuse_arguments(name, getattr(part, hook, None), stated)


def _refuse_arguments(name: str, override: object, stated: Callable[..., object]) -> None:
    """Raise ConfigError for a hook that cannot be called with the arguments of the `stated` one."""
    if not callable(override):
        raise ConfigError(f"{name}={printed(override)}: must be a method")
    hook = name.rpartition(".")[2]
    passed = list(signature(stated).parameters)[1:]
    takes = signature(override)
    if "now" in takes.parameters and "state" in passed:
        raise ConfigError(f"{name} takes now: it must take state, and state.now is the time")
    try:
        takes.bind(*passed)
    except TypeError:
        unannotated = [
            parameter.replace(annotation=parameter.empty) for parameter in takes.parameters.values()
        ]
        given = ", ".join(filter(None, ("self", str(Signature(unannotated))[1:-1])))
        wanted = ", ".join(("self", *passed))
        raise ConfigError(f"{name}({given}): must be {hook}({wanted})") from None


def flag(policy: Policy, hook: str, answer: object) -> bool:
    """The value of a hook as a bool; PolicyError unless it is true or false.

    A word such as "no" would be true, and None, of a hook without a return, false.
    """
    if answer is True or answer is False:
        return bool(answer)
    value = plain(answer)
    if isinstance(value, Real) and value in (0, 1):
        return bool(value)
    raise PolicyError(f"{hook_of(policy, hook)} gave {printed(answer)}: must be True or False")


def reason(policy: Policy, hook: str, answer: object) -> str | None:
    """The value of a hook; PolicyError unless it is a text with the reason, or None."""
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    raise PolicyError(
        f"{hook_of(policy, hook)} gave {printed(answer)}: must be a text that says why, or None"
    )


def seconds(part: object, hook: str, answer: object) -> float:
    """The value of a hook in seconds; AnswerError unless it is from 0 to `LONGEST`.

    Hot code calls it only for values that are not such floats already.
    """
    if type(answer) is float and 0.0 <= answer <= LONGEST:
        return answer
    if is_number(answer) and 0.0 <= (seconds := float(cast(SupportsFloat, answer))) <= LONGEST:
        return seconds
    problem = f"gave {printed(answer)}: must be seconds, a number from 0 to {LONGEST:g}"
    if isinstance(part, Policy):
        raise PolicyError(f"{hook_of(part, hook)} {problem}")
    raise AnswerError(f"{type(part).__name__}.{hook} {problem}")


def lines(part: object, hook: str, answer: object) -> list[str]:
    """The value of a hook; AnswerError unless it is a list of texts."""
    if isinstance(answer, (list, tuple)) and all(isinstance(line, str) for line in answer):
        return list(answer)
    name = f"{type(part).__name__}.{hook}"
    raise AnswerError(f"{name} gave {printed(answer)}: must be a list of texts")
