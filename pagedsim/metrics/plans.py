"""Step plans as text: one line each, equal if and only if the plans are equal."""

from __future__ import annotations

from collections.abc import Iterable

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.core.transfers import Direction


def described(plan: StepPlan, scheduler: Scheduler) -> str:
    """All decisions of a step, and the free blocks after it."""
    parts = {
        "out": _pairs(plan.swap_out),
        "copies": _pairs((source, target) for target, source in plan.copies.items()),
        "in": _pairs(plan.swap_in),
        "loads": _jobs(plan, Direction.LOAD),
        "stores": _jobs(plan, Direction.STORE),
        "flushed": " ".join(map(str, plan.flushed)),
        "chunks": " ".join(
            f"{chunk.request.id}{f'.{chunk.sequence}' * bool(chunk.sequence)}"
            f"[{chunk.start}:{chunk.context}]"
            for chunk in plan.chunks
        ),
        "decodes": _ids(plan.decodes),
        "preempted": _ids(plan.preempted),
        "displaced": _ids(plan.displaced),
        "resumed": _ids(plan.resumed),
        "rejected": _ids(rejection.request for rejection in plan.rejected),
        "held": _ids(plan.held),
        "hits": " ".join(f"{request.id}:{tokens}" for request, tokens in plan.hits),
    }
    memory = scheduler.memory
    said = [f"{name} {text}" for name, text in parts.items() if text]
    free = memory.total - plan.used_blocks
    said.append(f"free {free}" + f"+{plan.free_cpu_blocks}" * bool(memory.cpu_total))
    said.append(f"queues {plan.waiting} {plan.swapped}")
    return "; ".join(said)


def _ids(requests: Iterable[Request]) -> str:
    return " ".join(str(request.id) for request in requests)


def _jobs(plan: StepPlan, direction: Direction) -> str:
    """As in 3[5:0 6:1]: job 3 copies GPU block 5 from or to place 0 of the host, and 6 and 1."""
    jobs = []
    for transfer in plan.transfers:
        if transfer.direction is direction:
            pairs = zip(transfer.blocks, transfer.places, strict=True)
            moved = " ".join(f"{block}:{place}" for block, place in pairs)
            jobs.append(f"{transfer.job}[{moved}]")
    return " ".join(jobs)


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return " ".join(f"{source}>{target}" for source, target in pairs)
