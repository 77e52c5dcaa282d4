"""A server of which every step takes as long as one says, and what became of each request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy, Request, Scheduler, StepPlan

Seconds = Callable[[StepPlan], float]


def busy(plan: StepPlan) -> float:
    """A second, if anything is computed."""
    return 1.0 if plan.chunks or plan.decodes else 0.0


def by_tokens(plan: StepPlan) -> float:
    """A second a token."""
    return float(plan.prefill_tokens + plan.decode_count)


@dataclass(frozen=True)
class Job:
    """A request to come, that ends after `output` tokens."""

    at: float = 0.0
    prompt: int = 1
    output: int = 1
    knows: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """A run to its end."""

    scheduler: Scheduler
    requests: list[Request]
    plans: list[StepPlan] = field(default_factory=list)

    @property
    def mean_response(self) -> float:
        """From arrival to the last token."""
        times = [r.finished_at - r.arrival for r in self.requests]  # type: ignore[operator]
        return sum(times) / len(times)


def served(
    jobs: Iterable[Job],
    policy: str | Policy,
    *,
    seconds: Seconds = busy,
    blocks: int = 1000,
    block_size: int = 4,
    memory: str = "paged",
    look: Callable[[Scheduler, StepPlan], None] = lambda scheduler, plan: None,
    **settings: Any,
) -> Outcome:
    """Serve all jobs; `look` is called after every step."""
    cpu_blocks = settings.pop("cpu_blocks", 0)
    made = make_memory(memory, blocks=blocks, block_size=block_size, cpu_blocks=cpu_blocks)
    scheduler = make_scheduler(memory=made, policy=policy, **settings)
    coming = sorted(enumerate(jobs), key=lambda pair: pair[1].at)
    outcome = Outcome(scheduler, [])
    now = 0.0
    while coming or scheduler.unfinished:
        if not scheduler.unfinished:
            now = max(now, coming[0][1].at)
        while coming and coming[0][1].at <= now:
            number, job = coming.pop(0)
            request = Request(number, job.prompt, arrival=job.at, **job.knows)
            outcome.requests.append(request)
            scheduler.add(request, now, job.output)
        plan = scheduler.plan(now)
        now += seconds(plan)
        scheduler.commit(plan, now)
        scheduler.check()
        outcome.plans.append(plan)
        look(scheduler, plan)
        assert len(outcome.plans) < 20_000, "no request advances"
    return outcome


def started(outcome: Outcome) -> Sequence[Any]:
    """The ids of requests in the order in which they first ran."""
    return [request.id for plan in outcome.plans for request, _ in plan.hits]
