"""The policy interface: which request runs first, which yields its memory, and how.

A policy sees what a real server knows about a request, and never the length that its output will
have. Override the hooks that your idea needs; each has a default.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

from pagedsim.core.errors import ConfigError, PolicyError, is_number, plain, printed, shown
from pagedsim.core.events import Event
from pagedsim.core.plan import StepPlan
from pagedsim.core.request import Key, Rank, Request
from pagedsim.core.state import ServerState

RankChanges = Literal[
    "never", "when stale", "while decoding", "while running", "with time", "always"
]
Need = Literal["predictor", "deadline", "client", "prompts", "priority", "session"]


class PreemptionMode(Enum):
    """What becomes of the tokens that a preempted request had in memory."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


class Preemption:
    """Decides between recompute and swap where the policy does not; here: always recompute."""

    swaps = False
    """Whether it may ever answer SWAP, so that the memory must be able to."""

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode:
        """Recompute or swap?"""
        return PreemptionMode.RECOMPUTE


class Policy:
    """First come, first served; the base of every other policy.

    Requests of equal rank go in the order of their arrival. A question may be asked twice in a
    step, and where nothing hangs on its answer not at all: what a policy goes by changes in
    `observe` and `served`, not in answers.
    """

    paper: ClassVar[str] = ""
    """Where its rule comes from."""

    needs: ClassVar[tuple[Need, ...]] = ()
    """What requests must carry for it to be more than first come, first served."""

    rank_changes: RankChanges = "always"
    """When `rank` may change for a given request. The scheduler asks for a rank again only where
    this says that it may be out of date, so an honest answer is what makes a policy fast:
    "never" (a priority), "when stale" (as the hook `stale` says), "while decoding" (by the same
    amount for all that decode in a step: tokens left), "while running", "with time" (by `speed`,
    and when stale), "always", which ranks the whole queue anew in every step with a free seat."""

    by_client = False
    """Whether each client has a queue of its own, in order of arrival, and `rank` is asked of the
    first in each alone, before every admission. What others of the client rank does not matter."""

    displacing: bool | None = False
    """Whether `may_preempt` is to be asked at all. None leaves it to the batching: vLLM 0.6.6 let
    waiting requests push out running ones, vLLM 0.33 does not."""

    sorts_late = False
    """Whether new arrivals stay behind all others until a step admits nobody. vLLM 0.6.6 does so
    with priorities; under `batching=prefill_first` it costs urgent requests a step or two."""

    def rank(self, request: Request, state: ServerState) -> Rank:
        """Which request runs first: smaller is sooner. A number, or a tuple of numbers.

        Not overridden: first come, first served.
        """
        return 0.0

    def stale(self, state: ServerState) -> bool | Collection[Request]:
        """Whether any rank given before has changed, or whose; asked before a step whose plan goes
        by ranks, by "when stale" and "with time". Of the latter, otherwise than with the time."""
        return True

    def speed(self, request: Request, state: ServerState) -> float:
        """What its rank, a number, gains in a second; asked of those who wait, "with time"."""
        return 0.0

    def admit(self, request: Request, state: ServerState) -> bool:
        """May it start, given that it fits? A no holds back all that rank behind it.

        It may be asked again in every step, so an answer must not cost anything.
        """
        return True

    def should_reject(self, request: Request, state: ServerState) -> str | None:
        """Why the first in the queue, who has not run yet, is not served at all; None: it is."""
        return None

    def may_preempt(self, waiting: Request, running: Request, state: ServerState) -> bool:
        """May `waiting`, which does not fit, push out `running`, the last in rank?"""
        return rank_key(self, state, waiting) < rank_key(self, state, running)

    def choose_victim(
        self, running: Sequence[Request], needy: Request, state: ServerState
    ) -> Request:
        """Whose memory is taken so that `needy` can go on? Default: the last in rank.

        `running` are the candidates in the order of the batch. Under `prefill_first` they are
        those behind `needy`; under `unified` all that run, `needy` among them.
        """
        if not overrides(self, "rank"):
            return running[-1]
        return max(running, key=partial(rank_key, self, state))

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode | None:
        """Recompute or swap? None: as `preemption=` says."""
        return None

    def pin_prefix_for(self, request: Request, state: ServerState) -> float:
        """For how many seconds may nobody new have what the request, which is finished, leaves in
        the prefix cache? Those who run already may, as soon as nothing else is free."""
        return 0.0

    def observe(self, event: Event) -> None:
        """Told of who arrives, joins the batch, is preempted, and leaves, if overridden."""

    def served(self, plan: StepPlan, state: ServerState) -> None:
        """Told of each step that was carried out, if overridden; steps are then not skipped.

        Each of its chunks and decodes got what the plan says. With `async_scheduling` the next
        step is planned by then, and `request.generated` counts the tokens that are under way;
        `request.sampled_count` does not.
        """


class PolicyWrapper(Policy):
    """A policy around another: what it does not decide itself, `of` decides.

    That goes for `rank_changes`, `by_client`, `displacing` and `sorts_late`, too.
    """

    def __init__(self, of: Policy | None = None) -> None:
        """Without `of`, around first come, first served."""
        if of is not None and not isinstance(of, Policy):
            raise ConfigError(
                f"of={shown(of)}: must be a policy: its name, the path of its class, "
                "or settings with _target_"
            )
        self.inner = of = Policy() if of is None else of
        own = {name for kind in type(self).__mro__ if kind is not Policy for name in vars(kind)}
        inherited = {
            "rank_changes": of.rank_changes if overrides(of, "rank") else "never",
            "by_client": of.by_client,
            "displacing": of.displacing,
            "sorts_late": of.sorts_late,
        }
        vars(self).update((name, said) for name, said in inherited.items() if name not in own)

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

    def served(self, plan: StepPlan, state: ServerState) -> None:
        self.inner.served(plan, state)


def overrides(policy: Policy, hook: str) -> bool:
    """Whether a policy, or one that it stands around, has a hook of its own."""
    while isinstance(policy, PolicyWrapper) and getattr(type(policy), hook) is getattr(
        PolicyWrapper, hook
    ):
        policy = policy.inner
    return getattr(type(policy), hook) is not getattr(Policy, hook)


def hook_of(policy: Policy, hook: str) -> str:
    """Class and hook that answered, where a wrapper passes a call on to the policy inside."""
    while isinstance(policy, PolicyWrapper) and (
        getattr(type(policy), hook) is getattr(PolicyWrapper, hook)
    ):
        policy = policy.inner
    name = f"{type(policy).__name__}.{hook}"
    if isinstance(policy, PolicyWrapper):
        return f"{name}, around {type(policy.inner).__name__},"
    return name


def rank_of(policy: Policy, request: Request, state: ServerState) -> Rank:
    """A rank as a policy gives it, for those around it; PolicyError unless it is one."""
    return _plain_rank(policy, request, policy.rank(request, state))


def rank_key(policy: Policy, state: ServerState, request: Request) -> Key:
    """What requests are sorted by: rank, then arrival, then the order in which they were added."""
    assert request.arrival is not None  # set when it is added
    rank = policy.rank(request, state)
    kind = type(rank)
    if not (kind is float or kind is int) or rank != rank:
        rank = _plain_rank(policy, request, rank)
    return (rank, request.arrival, request._order)


def speed_of(policy: Policy, state: ServerState, request: Request) -> float:
    """What its rank gains in a second, a finite number."""
    speed = policy.speed(request, state)
    own: Any = _own(speed)
    if not is_number(own):
        name = hook_of(policy, "speed")
        raise PolicyError(f"{name} gave {printed(speed)} for {request!r}: must be a finite number")
    finite: float = own
    return finite


def _plain_rank(policy: Policy, request: Request, rank: object) -> Rank:
    """A rank in Python's own numbers; PolicyError unless it is a number or some numbers."""
    own = tuple(map(_own, rank if type(rank) is tuple else (rank,)))
    if not own or any(not isinstance(part, Real) or part != part for part in own):
        name, given = hook_of(policy, "rank"), printed(rank)
        raise PolicyError(
            f"{name} gave {given} for {request!r}: must be a number, or a tuple of numbers"
        )
    return own if type(rank) is tuple else own[0]


def _own(number: Any) -> Any:
    """NumPy's numbers and fractions as Python's own, which compiled code asks for; what is no
    number as it is."""
    if type(number) is float or type(number) is int:
        return number
    number = plain(number)
    if not isinstance(number, Real):
        return number
    return int(number) if isinstance(number, Integral) else float(number)
