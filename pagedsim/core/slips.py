"""Slips in a policy's class: what it says that nobody asks."""

from __future__ import annotations

from difflib import get_close_matches
from inspect import signature
from typing import get_args

from pagedsim.core.errors import ConfigError
from pagedsim.core.policy import Around, Policy, RankChanges

HOOKS = (
    *("rank", "stale", "speed", "admit", "sheds"),
    *("displaces", "victim", "keep", "observe", "served"),
)


def refuse_slips(policy: Policy) -> None:
    """Raise ConfigError for what a class says that nobody asks.

    That is a hook that takes `now`, as some did before all of them got `state`, a method that is
    called nearly like a hook, and a `rank_changes` that is none.
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
        own = getattr(type(policy), hook)
        if own is not getattr(Policy, hook) and "now" in signature(own).parameters:
            raise ConfigError(
                f"{name}.{hook} takes now: it must take state, and state.now is the time"
            )
