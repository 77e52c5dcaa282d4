"""The policy interface: which request runs first, which yields its memory, and how.

A policy sees what a real server knows about a request, and never the length that its output will
have. Override the hooks that your idea needs; each has a default.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from enum import Enum
from functools import partial
from inspect import signature
from numbers import Real
from typing import Literal, NamedTuple, get_args

from pagedsim.core.errors import ConfigError, PolicyError
from pagedsim.core.plan import StepPlan
from pagedsim.core.request import Request
from pagedsim.core.state import ServerState
from pagedsim.core.waiting import Key

RankChanges = Literal["never", "while running", "always"]


class Keep(Enum):
    """What becomes of the tokens that a preempted request had in memory."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


class Arrived(NamedTuple):
    """A request joined the waiting queue."""

    request: Request
    now: float


class Served(NamedTuple):
    """A step was carried out: each of its chunks and decodes got what the plan says.

    With `async_scheduling` the next step is planned by then, and `request.generated` counts the
    tokens that are under way; `request.told` does not.
    """

    plan: StepPlan
    now: float


class Left(NamedTuple):
    """A request finished, was aborted, or was rejected: `request.state` says which."""

    request: Request
    now: float


Event = Arrived | Served | Left


class Preemption:
    """Decides between recompute and swap where the policy does not; here: always recompute."""

    swaps = False
    """Whether it may ever answer SWAP, so that the memory must be able to."""

    def keep(self, victim: Request, state: ServerState) -> Keep:
        """Recompute or swap?"""
        return Keep.RECOMPUTE


_HOOKS = ("rank", "admit", "displaces", "victim", "keep", "observe")


class Policy:
    """First come, first served; the base of every other policy.

    Requests of equal rank go in the order of their arrival.
    """

    rank_changes: RankChanges = "always"
    """When `rank` may change for a given request. The scheduler asks for a rank again only where
    this says that it may be out of date, so an honest answer is what makes a policy fast:
    "never" (a priority), "while running" (tokens left), "always" (it depends on the time), which
    ranks the whole queue anew in every step with a free seat."""

    displacing: bool | None = False
    """Whether `displaces` is to be asked at all. None leaves it to the batching: vLLM 0.6.6 let
    waiting requests push out running ones, vLLM 0.33 does not."""

    sorts_late = False
    """Whether new arrivals stay behind all others until a step admits nobody. vLLM 0.6.6 does so
    with priorities; under `batching=prefill_first` it costs urgent requests a step or two."""

    def rank(self, request: Request, state: ServerState) -> float:
        """Which request runs first: smaller is sooner. Not overridden: first come, first served."""
        return 0.0

    def admit(self, request: Request, state: ServerState) -> bool:
        """May it start, given that it fits? A no holds back all that rank behind it.

        It may be asked again in every step, so an answer must not cost anything.
        """
        return True

    def displaces(self, waiting: Request, running: Request, state: ServerState) -> bool:
        """May `waiting`, which does not fit, push out `running`, the last in rank?"""
        return rank_key(self, state, waiting) < rank_key(self, state, running)

    def victim(self, running: Sequence[Request], needy: Request, state: ServerState) -> Request:
        """Whose memory is taken so that `needy` can go on? Default: the last in rank.

        `running` are the candidates in the order of the batch. Under `prefill_first` they are
        those behind `needy`; under `unified` all that run, `needy` among them.
        """
        if not ranks(self):
            return running[-1]
        return max(running, key=partial(rank_key, self, state))

    def keep(self, victim: Request, state: ServerState) -> Keep | None:
        """Recompute or swap? None: as `preemption=` says."""
        return None

    def observe(self, event: Event) -> None:
        """Told of arrivals, of tokens served and of departures, if overridden."""


def ranks(policy: Policy) -> bool:
    """Whether a policy has an order of its own."""
    return type(policy).rank is not Policy.rank


def observes(policy: Policy) -> bool:
    """Whether a policy wants events."""
    return type(policy).observe is not Policy.observe


def refuse_slips(policy: Policy) -> None:
    """Raise ConfigError for what a class says that nobody asks.

    That is a hook that takes `now`, as some did before all of them got `state`, a method that is
    called nearly like a hook, and a `rank_changes` that is none.
    """
    if policy.rank_changes not in get_args(RankChanges):
        name = f"{type(policy).__name__}.rank_changes={policy.rank_changes!r}"
        raise ConfigError(f"{name}: must be one of {', '.join(map(repr, get_args(RankChanges)))}")
    own_names = vars(type(policy))
    for name, value in own_names.items():
        close = get_close_matches(name, _HOOKS, 1, cutoff=0.8)
        if close and callable(value) and not name.startswith("_") and close[0] not in own_names:
            raise ConfigError(
                f"{type(policy).__name__}.{name}: no such hook; did you mean {close[0]!r}?"
            )
    for hook in _HOOKS:
        own = getattr(type(policy), hook)
        if own is not getattr(Policy, hook) and "now" in signature(own).parameters:
            name = f"{type(policy).__name__}.{hook}"
            raise ConfigError(f"{name} takes now: it must take state, and state.now is the time")


def patient(policy: Policy, displacing: bool) -> bool:
    """Whether a policy that could admit nobody will not change its mind while the batch decodes.

    Memory and seats only become scarcer then, so only an order or an answer that changes by
    itself could let somebody in.
    """
    kind = type(policy)
    if kind.admit is not Policy.admit:
        return False
    if displacing and kind.displaces is not Policy.displaces:
        return False
    if not ranks(policy) or policy.rank_changes == "never":
        return True
    return policy.rank_changes == "while running" and not displacing


def rank_key(policy: Policy, state: ServerState, request: Request) -> Key:
    """What requests are sorted by: rank, then arrival, then the order in which they were added."""
    assert request.arrival is not None  # set when it is added
    rank = policy.rank(request, state)
    if rank != rank or not isinstance(rank, int | float | Real):
        raise PolicyError(f"{type(policy).__name__}.rank gave {rank!r} for {request!r}: no number")
    return (rank, request.arrival, request._order)
