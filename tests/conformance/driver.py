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

from pagedsim.core import PagedMemory, PrefixMemory, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.core.batching import PrefillFirst, Unified
from pagedsim.core.request import GREEDY
from pagedsim.policies.ordering import FCFS, Priority
from pagedsim.policies.preemption import Recompute, Swap
from tests.conformance.offload import Host, make_connector

Step: TypeAlias = dict[str, Any]
Recording: TypeAlias = Path | ZipPath

FAMILIES = (
    "v0-fcfs-recompute",
    "v0-fcfs-swap",
    "v0-priority-recompute",
    "v1-async",
    "v1-async-prefix",
    "v1-async-priority",
    "v1-fcfs",
    "v1-prefix",
    "v1-prefix-priority",
    "v1-priority",
)
OFFLOAD_FAMILIES = (
    "offload-abort",
    "offload-arc",
    "offload-async",
    "offload-chunk",
    "offload-decode",
    "offload-limits",
    "offload-livelock",
    "offload-lru",
    "offload-noprefix",
    "offload-preempt",
    "offload-priority",
    "offload-sessions",
    "offload-slow",
    "offload-sync",
    "offload-threshold",
    "offload-tiers",
)
"""With a host tier (offload.py); their random workloads would need an oracle of their own."""
NOT_COMPARED = {
    "v0-prefix": "prefill_first has the prefix cache of vLLM 0.33, not that of 0.6.6, on purpose",
    "v1-async-spec": "speculative decoding is not built",
    "v1-grammar": "requests that wait for a grammar are not built",
    "v1-hybrid": "sliding windows and state-space layers are not built",
    "v1-kv": "KV connectors are not built",
    "v1-lora": "LoRA adapters are not built",
    "v1-mm": "images are not built",
    "v1-spec": "speculative decoding is not built",
    "hicache": "SGLang's: test_sglang.py",
    "idle": "SGLang's: test_sglang.py",
    "overlap": "SGLang's: test_sglang.py",
    "sgl": "SGLang's: test_sglang.py",
}
"""Why recordings are skipped, by the beginning of their family's name."""
GENERATED = 7  # every generated token
LIMITS = ("max_load_tokens", "max_offload_tokens")
UNORDERED = frozenset({"ignored", "preempted"})  # ids without an order of their own


@dataclass(frozen=True)
class Workload:
    """What is asked of a scheduler, and of which: `version` is 0 or 1."""

    name: str
    version: int
    config: dict[str, Any]
    requests: list[dict[str, Any]]
    silent: bool = False
    """Whether the executor reports no tokens although prompts have some."""


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


def family_of(path: Recording) -> str:
    """The name of a recording without its number."""
    return path.name.rpartition("-")[0]


def not_compared(family: str) -> str | None:
    """Why the recordings of a family are skipped; None if they are compared, or unknown."""
    if family in FAMILIES + OFFLOAD_FAMILIES:
        return None
    return next(
        (why for name, why in NOT_COMPARED.items() if f"{family}-".startswith(f"{name}-")), None
    )


def load(path: Recording) -> tuple[Workload, list[Step]]:
    """A recorded workload and the steps that vLLM decided, up to where it was `stuck` for long."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    steps: list[Step] = data["steps"]
    if steps:
        steps[-1].pop("stuck", None)
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
    loop = _two_in_flight if workload.config.get("async_scheduling") else _one_by_one
    return loop(workload, glide, check_every)


def _one_by_one(workload: Workload, glide: bool, check_every: int) -> Iterator[Step]:
    """A step is committed before the next one is planned."""
    scheduler = make_scheduler(workload)
    host = make_host(workload, scheduler)
    record = _record_v0 if workload.version == 0 else _record_v1
    coming = arrivals(workload)
    plan: StepPlan | None = None
    now = 0
    while coming or scheduler.unfinished or scheduler.transferring:
        _add_arrivals(scheduler, coming, now)
        gone = _abort(host, now)
        if scheduler.unfinished or scheduler.transferring:
            plan = plan or scheduler.plan(now)
            step = {"step": now} | gone | record(scheduler, plan)
            ended: list[int] = []
            if host:
                step |= host.decided(plan)
                ended = host.carry(plan, now)
            finished: list[Request] = []
            no_arrival = not coming or coming[0][0] > now + 1
            if glide and no_arrival and scheduler.uneventful(plan, 1):
                plan = plan if scheduler.fast_forward(plan, now + 1) else None
            else:
                finished = scheduler.commit(plan, now + 1, _tokens(workload, plan))
                plan = None
            if host:
                step |= host.completed(ended, now)
            if now % check_every == 0:
                scheduler.check()
            yield step | {"finished": _ids(finished)}
        now += 1


def _two_in_flight(workload: Workload, glide: bool, check_every: int) -> Iterator[Step]:
    """A call plans a step, then completes the one before it: vLLM's loop with async scheduling.

    When the last requests have finished, one more step is planned, an empty one by which vLLM
    reports them to its workers; the call after it only completes that step.
    """
    scheduler = make_scheduler(workload)
    host = make_host(workload, scheduler)
    coming = arrivals(workload)
    before: _Flight | None = None
    finished: Sequence[Request] = ()
    now = 0
    while coming or scheduler.unfinished or before or scheduler.transferring:
        _add_arrivals(scheduler, coming, now)
        gone = _abort(host, now)
        flight: _Flight | None = None
        ending: Sequence[Request] | None = None
        if glide and before and _repeats(scheduler, before.plan, now):
            ending = scheduler.fast_forward_ahead(before.plan, now)  # it is this step from now on
            flight = _Flight.of(workload, scheduler, before.plan, now)
        elif scheduler.unfinished or scheduler.transferring or (finished and not host):
            plan = scheduler.plan(now)
            flight = _Flight.of(workload, scheduler, plan, now, host)
            scheduler.dispatch(plan)
        decided = flight.decided if flight else {"step": now}
        if host:
            decided = {"scheduled": None} | decided | gone
            if flight and not before and not _open(scheduler, flight):
                before, flight = flight, None
        result = before.result(scheduler) if before else {"updated": None, "output": []}
        if not before:
            finished = ()
        elif ending is None:
            finished = scheduler.complete(before.plan, now, before.tokens)
        else:
            finished = scheduler.complete_ahead(ending, now)
        if host:
            result["output"] = [id for id, _ in result["output"]]
            result |= host.completed(before.ended if before else None, now)
        if now % check_every == 0:
            scheduler.check()
        if flight or before:
            yield decided | result | {"finished": _ids(finished)}
        before = flight
        now += 1


def _open(scheduler: Scheduler, flight: "_Flight") -> bool:
    """Whether vLLM plans another step before it takes up the result of this one."""
    work = flight.decided["scheduled"] or scheduler.unfinished
    return bool(work or scheduler.transferring)


def _abort(host: Host | None, now: int) -> Step:
    """Abort what the workload says; returns the field that tells of it."""
    if not host or not host.aborting:
        return {}
    host.abort(now)
    return {"aborted": host.aborted}


def make_host(workload: Workload, scheduler: Scheduler) -> Host | None:
    """What carries transfers out, if there are any."""
    if "offload" not in workload.config:
        return None
    return Host(workload.config, workload.requests, scheduler)


def _repeats(scheduler: Scheduler, plan: StepPlan, now: int) -> bool:
    return scheduler.uneventful(plan, 1) > 0 and scheduler.grow_ahead(plan, now)


class _Flight(NamedTuple):
    """A step in flight."""

    plan: StepPlan
    decided: Step
    tokens: dict[int | str, int] | None
    samplers: list[int | str]
    """The requests that it samples for, in its order."""
    ended: list[int]
    """The transfers that end in it."""

    @classmethod
    def of(
        cls,
        workload: Workload,
        scheduler: Scheduler,
        plan: StepPlan,
        now: int,
        host: Host | None = None,
    ) -> "_Flight":
        decided: Step = {"step": now} | _record_v1(scheduler, plan)
        samplers = sampled(plan)
        ids = [id for id, _ in decided["scheduled"] if id in samplers]
        ended: list[int] = []
        if host:
            decided |= host.decided(plan)
            ended = host.carry(plan, now)
        return cls(plan, decided, _tokens(workload, plan), ids, ended)

    def result(self, scheduler: Scheduler) -> Step:
        """What is recorded of its result, before that is processed."""
        output = [[id, 1] for id in self.samplers if id in scheduler.requests]
        return {"updated": self.decided["step"], "output": output}


def _add_arrivals(scheduler: Scheduler, coming: list[tuple[int, Request, int]], now: int) -> None:
    while coming and coming[0][0] <= now:
        _, request, output_len = coming.pop(0)
        scheduler.add(request, now, output_len=output_len)


def _tokens(workload: Workload, plan: StepPlan) -> dict[int | str, int] | None:
    """What the executor reports of a step: tokens, if prompts have any."""
    tells = any("prompt" in request for request in workload.requests)
    return sampled(plan) if tells and not workload.silent else None


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
        max_model_len=_max_model_len(config),
        async_scheduling=config.get("async_scheduling", False),
        connector=make_connector(config) if "offload" in config else None,
    )


def _max_model_len(config: dict[str, Any]) -> int:
    # The recorder could promise lengths that no memory holds; we refuse to.
    memory: int = config["gpu_blocks"] * config["block_size"]
    return min(config["max_model_len"], memory)


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
                _params(workload.config, entry),
                arrival=position,
                priority=entry.get("priority", 0),
                extra={name: entry[name] for name in LIMITS if entry.get(name) is not None},
            ),
            entry["output_len"],
        )
        for position, entry in enumerate(workload.requests)
    ]
    return sorted(coming, key=lambda item: (item[0], item[1].id))


def _params(config: dict[str, Any], entry: dict[str, Any]) -> SamplingParams:
    """With async scheduling it matters that vLLM knows how long an output may become."""
    if not config.get("async_scheduling"):
        return GREEDY
    room = _max_model_len(config) - entry["prompt_len"]
    return SamplingParams(max_tokens=min(entry["output_len"], room))


def prompt(entry: dict[str, Any]) -> list[int]:
    """The tokens of a prompt that is given as [stream, length] runs."""
    tokens = [
        GENERATED if stream < 0 else stream * 100_003 + i
        for stream, length in entry["prompt"]
        for i in range(length)
    ]
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
