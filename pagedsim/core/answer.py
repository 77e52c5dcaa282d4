"""What an executor tells when it commits a step: sampled tokens, and who ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagedsim.core.errors import PlanError
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
    """The requests that a plan samples for, without those that ended or went away since."""
    there = [request for request in _samplers(plan) if request.finish_reason is None]
    return [request for request in there if request not in plan.gone] if plan.gone else there


def samples(plan: StepPlan, request: Request) -> bool:
    """Whether a plan samples for a request."""
    if request in plan.gone:
        return False
    if request in plan.decodes:
        return True
    return any(chunk.samples and chunk.request is request for chunk in plan.chunks)


def _samplers(plan: StepPlan) -> list[Request]:
    return [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]


def refuse_answer(
    plan: StepPlan,
    tokens: Tokens | None,
    finished: Mapping[RequestId, str],
    with_tokens: bool,
    riders: int | None,
) -> None:
    """Raise PlanError unless these answer the plan.

    `with_tokens`: whether earlier answers had some; `riders`: how many requests decode already,
    None where the plan was launched before.
    """
    sampled = {request.id: request for request in sampled_in(plan)}
    problem = _stray(plan, tokens or {}, finished)
    if tokens is None:
        if with_tokens and sampled:
            problem = "its tokens are not told, though those of earlier steps were"
    elif riders and not with_tokens:
        problem = f"tokens are told, though {riders} requests decoded without reported tokens"
    elif missing := sampled.keys() - tokens.keys():
        problem = f"no tokens for requests {sorted(missing, key=str)}"
    else:
        for request in sampled.values():
            if riders is not None and request.generated and not request.outputs:
                problem = f"request {request.id!r} is told tokens, though its earlier ones were not"
            elif wrong := _mismatch(request, tokens[request.id]):
                problem = f"request {request.id!r} got {wrong}"
    if problem:
        raise PlanError(f"plan {plan.number}: {problem}")


def refuse_parents(plan: StepPlan, parents: Mapping[RequestId, Sequence[int]]) -> None:
    """Raise PlanError unless these say which sequences of decoding groups go on."""
    groups = {request.id: request for request in plan.decodes if request.width > 1}
    for name, chosen in parents.items():
        problem = "decodes no sequences that could" if name not in groups else None
        if not problem:
            problem = _mismatch(groups[name], Continuation(chosen, chosen))
        if problem:
            raise PlanError(
                f"plan {plan.number}: request {name!r}, parents {tuple(chosen)}: {problem}"
            )


def _stray(plan: StepPlan, tokens: Tokens, finished: Mapping[RequestId, str]) -> str | None:
    # To tell of a request that was aborted while the step ran is no mistake.
    planned = {request.id for request in _samplers(plan)}
    stray = (tokens.keys() | finished.keys()) - planned
    return f"requests {sorted(stray, key=str)} sampled nothing in it" if stray else None


def _mismatch(request: Request, answer: int | Continuation) -> str | None:
    tokens, parents = answer if isinstance(answer, Continuation) else ((answer,), None)
    if parents is None:
        if len(tokens) == request.width:
            return None
        return f"{len(tokens)} tokens for {request.width} sequences"
    if not 0 < len(parents) == len(tokens) <= request.width:
        return f"{len(tokens)} tokens for {len(parents)} of at most {request.width} sequences"
    if not set(parents) <= set(range(request.width)):
        return f"parents {tuple(parents)}, of {request.width} sequences"
    return None
