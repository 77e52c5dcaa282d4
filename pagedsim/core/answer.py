"""What an executor tells when it commits a step: sampled tokens, and who ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pagedsim.core.errors import PlanError
from pagedsim.core.request import State

if TYPE_CHECKING:
    from pagedsim.core.plan import StepPlan
    from pagedsim.core.request import Request, RequestId


class Continuation(NamedTuple):
    """The tokens that a step gave to a request of several sequences.

    New sequence i continues old sequence `parents[i]` with `tokens[i]`; an old sequence that no
    new one continues has ended. Without `parents` each goes on by itself.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None


Tokens = Mapping["RequestId", int | Continuation]


def sampled_in(plan: StepPlan) -> list[Request]:
    """The requests that a plan samples for, without those that were aborted since."""
    requests = (*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples))
    return [request for request in requests if request.state is State.RUNNING]


def refuse_answer(
    plan: StepPlan, tokens: Tokens | None, finished: Mapping[RequestId, str], told: bool
) -> None:
    """Raise PlanError unless these answer the plan; `told`: whether earlier answers had tokens."""
    sampled = {request.id: request for request in sampled_in(plan)}
    problem = _stray(plan, tokens or {}, finished, sampled)
    if tokens is None:
        if told and sampled:
            problem = "its tokens are not told, though those of earlier steps were"
    elif missing := sampled.keys() - tokens.keys():
        problem = f"no tokens for requests {sorted(missing, key=str)}"
    else:
        for request in sampled.values():
            if request.generated and not request.outputs:
                problem = f"request {request.id!r} is told tokens, though its earlier ones were not"
            elif wrong := _mismatch(request, tokens[request.id]):
                problem = f"request {request.id!r} got {wrong}"
    if problem:
        raise PlanError(f"plan {plan.number}: {problem}")


def _stray(
    plan: StepPlan,
    tokens: Tokens,
    finished: Mapping[RequestId, str],
    sampled: Mapping[RequestId, Request],
) -> str | None:
    # Tokens of a request that was aborted while the step ran are no mistake.
    planned = {request.id for request in plan.decodes} | {c.request.id for c in plan.chunks}
    stray = (tokens.keys() - planned) | (finished.keys() - sampled.keys())
    return f"requests {sorted(stray, key=str)} sampled nothing in it" if stray else None


def _mismatch(request: Request, answer: int | Continuation) -> str | None:
    tokens, parents = ((answer,), None) if isinstance(answer, int) else answer
    if parents is None:
        if len(tokens) == request.width:
            return None
        return f"{len(tokens)} tokens for {request.width} sequences"
    if not 0 < len(parents) == len(tokens) <= request.width:
        return f"{len(tokens)} tokens for {len(parents)} of at most {request.width} sequences"
    if not set(parents) <= set(range(request.width)):
        return f"parents {tuple(parents)}, of {request.width} sequences"
    return None
