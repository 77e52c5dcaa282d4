"""Slips in a policy: what its class says that nobody asks, and answers that are none."""

from __future__ import annotations

from difflib import get_close_matches
from inspect import Signature, signature
from typing import get_args

from pagedsim.core.errors import ConfigError, PolicyError
from pagedsim.core.policy import Around, Policy, RankChanges

HOOKS = (
    *("rank", "stale", "speed", "admit", "sheds"),
    *("displaces", "victim", "keep", "lingers", "observe", "served"),
)


def refuse_slips(policy: Policy) -> None:
    """Raise ConfigError for what a class says that nobody asks.

    That is a hook that takes `now`, as some did before all of them got `state`, or too few or too
    many arguments, a method that is called nearly like a hook, and a `rank_changes` that is none.
    """
    if isinstance(policy, Around):
        refuse_slips(policy.of)
    name = type(policy).__name__
    if policy.rank_changes not in get_args(RankChanges):
        known = ", ".join(map(repr, get_args(RankChanges)))
        raise ConfigError(f"{name}.rank_changes={policy.rank_changes!r}: must be one of {known}")
    own_names = vars(type(policy))
    for method, value in own_names.items():
        close = get_close_matches(method, HOOKS, 1, cutoff=0.8)
        if not close or close[0] == method or not callable(value) or method.startswith("_"):
            continue
        if close[0] not in own_names:
            raise ConfigError(f"{name}.{method}: no such hook; did you mean {close[0]!r}?")
    for hook in HOOKS:
        if getattr(type(policy), hook) is not getattr(Policy, hook):
            _refuse_arguments(policy, hook)


def _refuse_arguments(policy: Policy, hook: str) -> None:
    """Raise ConfigError for a hook that cannot be called as hooks are."""
    name, own = f"{type(policy).__name__}.{hook}", getattr(policy, hook)
    if not callable(own):
        raise ConfigError(f"{name}={own!r}: must be a method")
    takes = signature(own)
    if "now" in takes.parameters:
        raise ConfigError(f"{name} takes now: it must take state, and state.now is the time")
    asked = list(signature(getattr(Policy, hook)).parameters)[1:]
    try:
        takes.bind(*asked)
    except TypeError:
        plain = [one.replace(annotation=one.empty) for one in takes.parameters.values()]
        given = ", ".join(filter(None, ("self", str(Signature(plain))[1:-1])))
        wanted = ", ".join(("self", *asked))
        raise ConfigError(f"{name}({given}): must be {hook}({wanted})") from None


def flag(policy: Policy, hook: str, answer: object) -> bool:
    """The answer of a hook as it is; PolicyError unless it is true or false.

    A word such as "no" would be true, and None, of a hook that forgot to answer, false.
    """
    if answer is not True and answer is not False and answer != bool(answer):
        raise PolicyError(f"{_asked(policy, hook)} gave {answer!r}: must be True or False")
    return bool(answer)


def reason(policy: Policy, hook: str, answer: object) -> str | None:
    """The answer of a hook as it is; PolicyError unless it is a text that says why, or None."""
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    raise PolicyError(
        f"{_asked(policy, hook)} gave {answer!r}: must be a text that says why, or None"
    )


def _asked(policy: Policy, hook: str) -> str:
    """Whose hook it is that was asked, where one policy stands around another."""
    while isinstance(policy, Around) and getattr(type(policy), hook) is getattr(Around, hook):
        policy = policy.of
    name = f"{type(policy).__name__}.{hook}"
    return f"{name}, around {type(policy.of).__name__}," if isinstance(policy, Around) else name
