"""Drives our scheduler through a recorded or generated workload, and compares step by step.

A step is a dictionary with the fields of data/README.md, from any source: vLLM, one of the
oracles, or ours.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zipfile import Path as ZipPath

from pagedsim.core import PagedMemory, PrefixMemory, Request, Scheduler, StepPlan
from pagedsim.core.batching import PrefillFirst, Unified
from pagedsim.policies.ordering import FCFS, Priority
from pagedsim.policies.preemption import Recompute, Swap

Step: TypeAlias = dict[str, Any]
Recording: TypeAlias = Path | ZipPath

FAMILIES = (
    "v0-fcfs-recompute",
    "v0-fcfs-swap",
    "v0-priority-recompute",
    "v1-fcfs",
    "v1-prefix",
    "v1-prefix-priority",
    "v1-priority",
)
GENERATED = 7  # every generated token
UNORDERED = frozenset({"ignored", "preempted"})  # ids without an order of their own


@dataclass(frozen=True)
class Workload:
    """What is asked of a scheduler, and of which: `version` is 0 or 1."""

    name: str
    version: int
    config: dict[str, Any]
    requests: list[dict[str, Any]]


class Difference(NamedTuple):
    """Where two schedulers part."""

    step: int
    field: str
    wanted: Any
    got: Any

    def __str__(self) -> str:
        return f"step {self.step}, {self.field}: wanted {self.wanted}, got {self.got}"


def recordings(place: Path) -> Sequence[Recording]:
    """The recordings in a folder or a zip archive, in the order of their names."""
    if place.suffix == ".zip":
        return sorted(ZipPath(place).iterdir(), key=lambda path: path.name)
    return sorted(place.glob("*.json.gz"))


def load(path: Recording) -> tuple[Workload, list[Step]]:
    """A recorded workload and the steps that vLLM decided."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    steps: list[Step] = data["steps"]
    version = 0 if steps and "prefill" in steps[0] else 1
    return Workload(path.name, version, data["config"], data["requests"]), steps


def first_difference(wanted: Iterable[Step], got: Iterable[Step]) -> Difference | None:
    """The first field, in the first step, in which the two disagree."""
    for want, have in zip_longest(wanted, got):
        if want is None or have is None:
            step = (want or have)["step"]
            return Difference(step, "the step itself", want or "nothing", have or "nothing")
        for field in want | have:
            a, b = _comparable(field, want), _comparable(field, have)
            if a != b:
                return Difference(want["step"], field, a, b)
    return None


def _comparable(field: str, step: Step) -> Any:
    value = step.get(field, "nothing")
    return sorted(value) if field in UNORDERED and isinstance(value, list) else value


def drive(workload: Workload, glide: bool = False, check_every: int = 1) -> Iterator[Step]:
    """Every step that our scheduler decides, its invariants checked every so many.

    With `glide`, steps in which nothing can change are not planned but glided over.
    """
    scheduler = make_scheduler(workload)
    record = _record_v0 if workload.version == 0 else _record_v1
    coming = arrivals(workload)
    tells = any("prompt" in request for request in workload.requests)
    plan: StepPlan | None = None
    now = 0
    while coming or scheduler.unfinished:
        while coming and coming[0][0] <= now:
            _, request, output_len = coming.pop(0)
            scheduler.add(request, now, output_len=output_len)
        if scheduler.unfinished:
            plan = plan or scheduler.plan(now)
            step = {"step": now} | record(scheduler, plan)
            finished: list[Request] = []
            no_arrival = not coming or coming[0][0] > now + 1
            if glide and no_arrival and scheduler.uneventful(plan, 1):
                plan = plan if scheduler.fast_forward(plan, now + 1) else None
            else:
                finished = scheduler.commit(plan, now + 1, sampled(plan) if tells else None)
                plan = None
            if now % check_every == 0:
                scheduler.check()
            yield step | {"finished": _ids(finished)}
        now += 1


def make_scheduler(workload: Workload) -> Scheduler:
    config = workload.config
    memory_type = PrefixMemory if config.get("prefix_caching") else PagedMemory
    memory = memory_type(config["gpu_blocks"], config["block_size"], config.get("cpu_blocks") or 0)
    return Scheduler(
        memory=memory,
        batching=PrefillFirst() if workload.version == 0 else Unified(),
        policy=Priority() if config.get("policy") == "priority" else FCFS(),
        preemption=Swap() if config.get("preemption") == "swap" else Recompute(),
        max_seqs=config["max_seqs"],
        max_batched_tokens=config["max_batched_tokens"],
        # The recorder could promise lengths that no memory holds; we refuse to.
        max_model_len=min(config["max_model_len"], memory.longest),
    )


def arrivals(workload: Workload) -> list[tuple[int, Request, int]]:
    """(step, request, output length) in the order in which they arrive.

    Ties arrive in order of id; the arrival time by which equal priorities are ranked is the
    position in the list.
    """
    coming = [
        (
            entry["arrival_step"],
            Request(
                entry["id"],
                prompt(entry) if "prompt" in entry else entry["prompt_len"],
                arrival=position,
                priority=entry.get("priority", 0),
            ),
            entry["output_len"],
        )
        for position, entry in enumerate(workload.requests)
    ]
    return sorted(coming, key=lambda item: (item[0], item[1].id))


def prompt(entry: dict[str, Any]) -> list[int]:
    """The tokens of a prompt that is given as [stream, length] runs."""
    tokens = [stream * 100_003 + i for stream, length in entry["prompt"] for i in range(length)]
    return tokens[: entry["prompt_len"]]


def sampled(plan: StepPlan) -> dict[int | str, int]:
    """The tokens that this step generates."""
    prefilled = [chunk.request for chunk in plan.chunks if chunk.samples]
    return {request.id: GENERATED for request in (*plan.decodes, *prefilled)}


def _ids(requests: Iterable[Request]) -> list[int | str]:
    return [request.id for request in requests]


def _record_v0(scheduler: Scheduler, plan: StepPlan) -> Step:
    return {
        "prefill": [[chunk.request.id, chunk.length] for chunk in plan.chunks],
        "decode": _ids(plan.decodes),
        "swap_in": len(plan.swap_in),
        "swap_out": len(plan.swap_out),
        "preempted": len(plan.preempted),
        "ignored": [rejection.request.id for rejection in plan.rejected],
        "waiting": _ids(scheduler.waiting),
        "running": _ids(scheduler.running),
        "swapped": _ids(scheduler.swapped),
        "free_gpu": scheduler.memory.free,
        "free_cpu": scheduler.memory.cpu_free,
    }


def _record_v1(scheduler: Scheduler, plan: StepPlan) -> Step:
    seats = {request: seat for seat, request in enumerate(scheduler.running)}
    chunks = [(seats[chunk.request], chunk.request.id, chunk.length) for chunk in plan.chunks]
    decodes = [(seats[request], request.id, 1) for request in plan.decodes]
    step: Step = {
        # Chunks and decodes keep the order of the batch, each among themselves: or this is not
        # sorted by seat and differs from what is wanted.
        "scheduled": [[id, tokens] for _, id, tokens in merge(chunks, decodes)],
        "cached": [[request.id, tokens] for request, tokens in plan.hits if tokens],
        "preempted": _ids(plan.preempted),
        "waiting": _ids(scheduler.waiting),
        "running": _ids(scheduler.running),
        "free": scheduler.memory.free,
    }
    # Of V1 there is no such field, since vLLM refuses at the door what it cannot serve.
    if plan.rejected:
        step["ignored"] = [rejection.request.id for rejection in plan.rejected]
    return step
