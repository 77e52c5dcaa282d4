"""The policy interface: which request runs first, which is preempted, and how.

A policy sees what a real server knows about a request, and never the length that its output will
have. Override the hooks that your idea needs; each has a default.

The order of events is the same in the simulator and in the engine. `Admitted` and `Preempted` are
delivered while a step is planned, in the order of its decisions; `Left` when the step has ended,
and `Arrived` with the next plan, before its decisions, since an engine cannot look at new requests
while a step runs. So a request that arrives during a step is observed after the departures at the
end of it, with an earlier `now`: that of `Arrived` may go back, that of all other events never
does. Arrivals are in order of time among themselves, and the events of one request in that of its
life.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, NamedTuple

from pagedsim.core.batch_state import ServerState
from pagedsim.core.errors import ConfigError, PolicyError, is_number, plain, printed, shown
from pagedsim.core.plan import StepPlan
from pagedsim.core.request import Key, Rank, Request


class Arrived(NamedTuple):
    """A request joined the waiting queue, or came with its keys and values and need not wait."""

    request: Request
    now: float


class Admitted(NamedTuple):
    """A request joined the batch: for the first time, or again after it was preempted."""

    request: Request
    now: float


class Preempted(NamedTuple):
    """A request lost its memory and its place in the batch."""

    request: Request
    now: float


class Left(NamedTuple):
    """A request finished, was aborted, was rejected, or goes on elsewhere: `request.state` says
    which."""

    request: Request
    now: float


Event = Arrived | Admitted | Preempted | Left


RankChanges = Literal[
    "never", "when stale", "while decoding", "while running", "with time", "always"
]
Need = Literal["predictor", "deadline", "client", "prompts", "priority", "session"]


class PreemptionMode(Enum):
    """What becomes of the KV blocks of a preempted request."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


class Preemption:
    """The choice between recompute and swap, unless the policy decides; here: always recompute."""

    swaps = False
    """Whether it may ever return SWAP, so that the memory must support it."""

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode:
        """Recompute or swap."""
        return PreemptionMode.RECOMPUTE


class Policy:
    """First come, first served; the base of every other policy.

    Requests of equal rank go in the order of their arrival. A hook may be called twice in a step,
    and not at all where nothing depends on its value: a policy changes its state in `observe` and
    `after_step` alone.
    """

    paper: ClassVar[str] = ""
    """The source of its rule."""

    needs: ClassVar[tuple[Need, ...]] = ()
    """The request fields without which it is first come, first served."""

    rank_changes: RankChanges = "always"
    """When `rank` may change for a given request. The scheduler calls `rank` again only where
    the last value may be out of date by this, so an accurate value makes a policy fast:
    "never" (a priority), "when stale" (as the hook `stale` says), "while decoding" (by the same
    amount for all that decode in a step: tokens left), "while running", "with time" (by `speed`,
    and when stale), "always", which ranks the whole queue anew in every step with a free seat."""

    by_client = False
    """Whether each client has a queue of its own, in order of arrival, and `rank` is called for the
    head of each alone, before every admission. The ranks of the others do not matter."""

    displacing: bool | None = False
    """Whether `may_preempt` is called at all. None leaves it to the batching: vLLM 0.6.6 let
    waiting requests push out running ones, vLLM 0.33 does not."""

    walks_tree = False
    """Whether it reads `state.prefix_node`, so that the memory's prefix cache must be a tree."""

    sorts_late = False
    """Whether new arrivals stay behind all others until a step admits none. vLLM 0.6.6 does so
    with priorities; under `batching=prefill_first` it costs urgent requests a step or two."""

    def rank(self, request: Request, state: ServerState) -> Rank:
        """The rank of a request, smaller first: a number, or a tuple of numbers.

        Not overridden: first come, first served.
        """
        return 0.0

    def stale(self, state: ServerState) -> bool | Collection[Request]:
        """Whether ranks have changed, or the requests whose ranks have; called before a step whose
        plan depends on ranks, with "when stale" and "with time" (there: other than with time)."""
        return True

    def speed(self, request: Request, state: ServerState) -> float:
        """The change of a numeric rank per second; called for waiting requests, "with time"."""
        return 0.0

    def admit(self, request: Request, state: ServerState) -> bool:
        """Whether it may start, given that it fits. False holds back all that rank behind it.

        It may be called in every step, so it must be cheap.
        """
        return True

    def should_reject(self, request: Request, state: ServerState) -> str | None:
        """A reason to reject the head of the queue, which has not run yet, or None."""
        return None

    def may_preempt(self, waiting: Request, running: Request, state: ServerState) -> bool:
        """Whether `waiting`, which does not fit, may preempt `running`, the last in rank."""
        return rank_key(self, state, waiting) < rank_key(self, state, running)

    def choose_victim(
        self, running: Sequence[Request], needy: Request, state: ServerState
    ) -> Request:
        """The request to preempt so that `needy` can continue. Default: the last in rank.

        `running` are the candidates in the order of the batch. Under `prefill_first` they are
        those behind `needy`; under `unified` all that run, `needy` among them.
        """
        if not overrides(self, "rank"):
            return running[-1]
        return max(running, key=partial(rank_key, self, state))

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode | None:
        """Recompute or swap; None leaves it to `preemption=`."""
        return None

    def pin_prefix_for(self, request: Request, state: ServerState) -> float:
        """Seconds to pin a finished request's blocks in the prefix cache against new admissions.
        Running requests may evict them once no other block is free."""
        return 0.0

    def observe(self, event: Event) -> None:
        """Called on arrivals, admissions, preemptions and departures, if overridden."""

    def after_step(self, plan: StepPlan, state: ServerState) -> None:
        """Called after each step, if overridden; steps are then not fast-forwarded.

        Each of its chunks and decodes got what the plan says. With `async_scheduling` the next
        step is planned by then, and `request.generated` counts tokens in flight;
        `request.sampled_count` does not.
        """


class PolicyWrapper(Policy):
    """A policy around another: hooks that it does not override are those of `inner`.

    That goes for `rank_changes`, `by_client`, `displacing`, `sorts_late` and `walks_tree`, too.
    """

    def __init__(self, of: Policy | None = None) -> None:
        """`of` is the policy to wrap; by default first come, first served."""
        if of is not None and not isinstance(of, Policy):
            raise ConfigError(
                f"of={shown(of)}: must be a policy: its name, the path of its class, "
                "or settings with _target_"
            )
        self.inner = of = Policy() if of is None else of
        defined = {name for kind in type(self).__mro__ if kind is not Policy for name in vars(kind)}
        inherited = {
            "rank_changes": of.rank_changes if overrides(of, "rank") else "never",
            "by_client": of.by_client,
            "displacing": of.displacing,
            "sorts_late": of.sorts_late,
            "walks_tree": of.walks_tree,
        }
        vars(self).update((name, value) for name, value in inherited.items() if name not in defined)

    def rank(self, request: Request, state: ServerState) -> Rank:
        return self.inner.rank(request, state)

    def stale(self, state: ServerState) -> bool | Collection[Request]:
        return self.inner.stale(state)

    def speed(self, request: Request, state: ServerState) -> float:
        return self.inner.speed(request, state)

    def admit(self, request: Request, state: ServerState) -> bool:
        return self.inner.admit(request, state)

    def should_reject(self, request: Request, state: ServerState) -> str | None:
        return self.inner.should_reject(request, state)

    def may_preempt(self, waiting: Request, running: Request, state: ServerState) -> bool:
        if overrides(self.inner, "may_preempt"):
            return self.inner.may_preempt(waiting, running, state)
        return super().may_preempt(waiting, running, state)

    def choose_victim(
        self, running: Sequence[Request], needy: Request, state: ServerState
    ) -> Request:
        if overrides(self.inner, "choose_victim"):
            return self.inner.choose_victim(running, needy, state)
        return super().choose_victim(running, needy, state)

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode | None:
        return self.inner.swap_or_recompute(victim, state)

    def pin_prefix_for(self, request: Request, state: ServerState) -> float:
        return self.inner.pin_prefix_for(request, state)

    def observe(self, event: Event) -> None:
        self.inner.observe(event)

    def after_step(self, plan: StepPlan, state: ServerState) -> None:
        self.inner.after_step(plan, state)


def overrides(policy: Policy, hook: str) -> bool:
    """Whether a policy, or one that it wraps, overrides a hook."""
    return getattr(type(_answering(policy, hook)), hook) is not getattr(Policy, hook)


def hook_of(policy: Policy, hook: str) -> str:
    """The class and hook whose value was returned, through all wrappers."""
    policy = _answering(policy, hook)
    name = f"{type(policy).__name__}.{hook}"
    if isinstance(policy, PolicyWrapper):
        return f"{name}, around {type(policy.inner).__name__},"
    return name


def _answering(policy: Policy, hook: str) -> Policy:
    """The policy whose hook is called: of wrappers that pass it on, the one inside."""
    passed_on = getattr(PolicyWrapper, hook)
    while isinstance(policy, PolicyWrapper) and getattr(type(policy), hook) is passed_on:
        policy = policy.inner
    return policy


def rank_of(policy: Policy, request: Request, state: ServerState) -> Rank:
    """A checked rank of a policy, for its wrappers; PolicyError unless it is valid."""
    return _plain_rank(policy, request, policy.rank(request, state))


def rank_key(policy: Policy, state: ServerState, request: Request) -> Key:
    """What requests are sorted by: rank, then arrival, then the order in which they were added."""
    assert request._arrival is not None  # set when it is added
    rank = policy.rank(request, state)
    kind = type(rank)
    if not (kind is float or kind is int) or rank != rank:
        rank = _plain_rank(policy, request, rank)
    return (rank, request._arrival, request._order)


def speed_of(policy: Policy, state: ServerState, request: Request) -> float:
    """The change of its rank per second, a finite number."""
    speed = policy.speed(request, state)
    plain_speed: Any = _own(speed)
    if not is_number(plain_speed):
        name = hook_of(policy, "speed")
        raise PolicyError(f"{name} gave {printed(speed)} for {request!r}: must be a finite number")
    finite: float = plain_speed
    return finite


def _plain_rank(policy: Policy, request: Request, rank: object) -> Rank:
    """A rank in Python's own numbers; PolicyError unless it is a number or a tuple of numbers."""
    if type(rank) is tuple and rank:
        for part in rank:
            if not (type(part) is int or type(part) is float) or part != part:
                break
        else:
            return rank
    parts = tuple(map(_own, rank if type(rank) is tuple else (rank,)))
    if not parts or any(not isinstance(part, Real) or part != part for part in parts):
        name, given = hook_of(policy, "rank"), printed(rank)
        raise PolicyError(
            f"{name} gave {given} for {request!r}: must be a number, or a tuple of numbers"
        )
    return parts if type(rank) is tuple else parts[0]


def _own(number: Any) -> Any:
    """NumPy's numbers and fractions as Python's own, which compiled code requires; other values
    unchanged."""
    if type(number) is float or type(number) is int:
        return number
    number = plain(number)
    if not isinstance(number, Real):
        return number
    return int(number) if isinstance(number, Integral) else float(number)
