"""Drives our scheduler through workloads that SGLang's was driven through, and records alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from pagedsim.core import Memory, PagedMemory, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.core.memory import EvictionPolicy
from pagedsim.core.plan import sampled_in
from pagedsim.core.policy import Policy
from pagedsim.policies import eviction
from pagedsim.policies.ordering import FCFS, LOF, Priority
from pagedsim.policies.prefix_order import DFSWeight, LongestPrefix, TokenHRRN
from pagedsim.sglang.batching import SGLang
from pagedsim.sglang.radix import Node, RadixMemory
from pagedsim.sglang.storage import PrefetchSettings
from tests.conformance.driver import GENERATED, Step, prompt
from tests.conformance.tiers import SpiedHiCache, SpiedStorage, Tiers

STOP = 1
POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FCFS,
    "lpm": LongestPrefix,
    "dfs-weight": DFSWeight,
    "lof": LOF,
    "hrrn": TokenHRRN,
}
EVICTIONS: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": eviction.LRU,
    "lfu": eviction.LFU,
    "slru": eviction.SLRU,
    "fifo": eviction.FIFO,
    "filo": eviction.FILO,
    "mru": eviction.MRU,
    "priority": eviction.PriorityLRU,
    "tlru": eviction.TLRU,
}


def make_scheduler(config: dict[str, Any]) -> Scheduler:
    page = config["page_size"]
    blocks = config["max_total_tokens"] // page
    memory: Memory
    if "write_policy" in config:
        settings: dict[str, Any] = {
            "eviction": eviction_of(config),
            "low_values_first": config["low_first"],
            "host_blocks": config["host_tokens"] // page,
            "write_policy": config["write_policy"],
        }
        if storage := config["storage"]:
            names = [one.name for one in fields(PrefetchSettings)]
            settings["prefetch"] = PrefetchSettings(**{name: storage[name] for name in names})
        memory = (SpiedStorage if storage else SpiedHiCache)(blocks, page, **settings)
    else:
        memory = (RadixMemory if config["radix_cache"] else PagedMemory)(blocks, page)
    batching = SGLang(
        chunked_prefill_size=config["chunked_prefill_size"],
        mixed_chunk=config["mixed_chunk"],
        conservativeness=config["conservativeness"],
        prefill_max_requests=config["prefill_max_requests"],
        preemption_threshold=config["preemption_threshold"],
        retraction="rank" if config["retraction_policy"] == "priority" else "length",
        idle_reset="overlap" in config,
    )
    return Scheduler(
        memory=memory,
        batching=batching,
        policy=policy_of(config),
        max_seqs=config["max_running"],
        max_batched_tokens=config["max_prefill_tokens"],
        max_model_len=min(config["context_len"], memory.longest),
        async_scheduling=config.get("overlap", False),
    )


def eviction_of(config: dict[str, Any]) -> EvictionPolicy:
    return EVICTIONS[config["eviction"]](**config.get("eviction_config", {}))


def policy_of(config: dict[str, Any]) -> Policy:
    if config["priority"]:
        return Priority(displace=config["preemption"])
    if not config["radix_cache"] and config["policy"] != "lof":
        return FCFS()  # as SGLang does
    return POLICIES[config["policy"]]()


def requests_of(config: dict[str, Any], entries: list[dict[str, Any]]) -> list[tuple[int, Request]]:
    sign = 1 if config["low_first"] else -1
    found = [
        (
            entry["arrival_step"],
            Request(
                entry["id"],
                prompt(entry),
                SamplingParams(
                    temperature=0.0, max_tokens=entry["max_tokens"], ignore_eos=entry["ignore_eos"]
                ),
                arrival=place,
                priority=sign * entry.get("priority", 0),
            ),
        )
        for place, entry in enumerate(entries)
    ]
    return sorted(found, key=lambda one: (one[0], one[1].id))


def drive(
    config: dict[str, Any],
    entries: list[dict[str, Any]],
    glide: bool = False,
    tokens_reported: bool = True,
    check_every: int = 1,
) -> Iterator[Step]:
    """Every step that our scheduler decides.

    Without `tokens_reported` it does not know what was generated, as in most simulations; then,
    with `glide`, steps in which nothing can change are fast-forwarded.
    """
    scheduler = make_scheduler(config)
    lengths = {entry["id"]: entry["output_len"] for entry in entries}
    coming = requests_of(config, entries)
    seconds = (config.get("storage") or {}).get("iter_seconds", 1)
    now = 0
    ahead: StepPlan | None = None
    ratio = 0.0
    ended = False  # whether the last step ended all requests: the loop then finds nothing to do
    iterations = "overlap" in config  # a step for each iteration of the loop
    tiers = Tiers(config, scheduler) if "write_policy" in config else None
    while coming or scheduler.unfinished or (ended and iterations) or (tiers and tiers.busy):
        while coming and coming[0][0] <= now:
            _, request = coming.pop(0)
            scheduler.add(request, now * seconds, None if tokens_reported else lengths[request.id])
        if tiers:
            tiers.poll(now)
        if scheduler.unfinished:
            batching = scheduler.batching
            assert isinstance(batching, SGLang)
            if ahead is None:
                ratio = batching.ratio
                if scheduler._idle_since is not None and now * seconds > scheduler._idle_since:
                    ratio = batching.first_ratio if batching.idle_reset else ratio
            going_on = batching.chunked
            plan = ahead or scheduler.plan(now * seconds)
            step = record(scheduler, plan, now, going_on) | {
                "ratio": [round(ratio, 9), round(batching.ratio, 9)]
            }
            if tiers:
                step |= tiers.planned(plan, now)
            ahead, finished = None, []
            arrives = coming and coming[0][0] <= now + 1
            busy = tiers is not None and tiers.busy
            if glide and not (arrives or busy) and scheduler.uneventful(plan, 1):
                free, ratio = unused(scheduler.memory), batching.ratio
                step |= tiers.processed(now) if tiers else {}
                ahead = plan if scheduler.fast_forward(plan, (now + 1) * seconds) else None
            elif not tokens_reported:
                finished = scheduler.commit(plan, (now + 1) * seconds)
                free = unused(scheduler.memory)
            else:
                tokens = answers(plan, lengths)
                ends = {name: "stop" for name, token in tokens.items() if token == STOP}
                finished = scheduler.commit(plan, (now + 1) * seconds, tokens, ends)
                free = unused(scheduler.memory)
            if tiers and "host_used_after" not in step:
                step |= tiers.processed(now)
            if now % check_every == 0:
                scheduler.check()
            step |= {"finished": [one.id for one in finished], "free_after": free}
            yield step | (of_iteration(plan, now) if iterations else {})
            ended = not scheduler.unfinished
        elif ended or (tiers and tiers.acknowledged):
            ended = bool(iterations and tiers and tiers.busy)
            step = nothing(scheduler, now)
            if tiers:
                step |= tiers.planned(StepPlan(0, now), now) | tiers.processed(now)
            yield step | (of_iteration(None, now, idle=not ended) if iterations else {})
        now += 1


def drive_overlapped(
    config: dict[str, Any], entries: list[dict[str, Any]], check_every: int = 1
) -> Iterator[Step]:
    """The same by the loop that plans a step while the one before is under way."""
    scheduler = make_scheduler(config)
    batching = scheduler.batching
    assert isinstance(batching, SGLang)
    lengths = {entry["id"]: entry["output_len"] for entry in entries}
    coming = requests_of(config, entries)
    tiers = Tiers(config, scheduler) if "write_policy" in config else None
    last: tuple[int, StepPlan, dict[Any, int]] | None = None  # under way
    now, idle, decoding = 0, True, 0
    while coming or scheduler.unfinished or last or not idle:
        while coming and coming[0][0] <= now:
            scheduler.add(coming.pop(0)[1], now)
        if tiers:
            tiers.poll(now)
        ratio = batching.ratio
        if scheduler._idle_since is not None and now > scheduler._idle_since:
            ratio = batching.first_ratio
        plan = going_on = None
        if scheduler.unfinished:
            going_on, decoding = batching.chunked, batching._decoding
            plan = scheduler.plan(now)
        elif last is None and idle:
            now += 1
            continue
        idle = not (plan or last or (tiers and tiers.busy))
        step = record(scheduler, plan or StepPlan(0, now), now, going_on)
        if tiers:
            step |= tiers.planned(plan or StepPlan(0, now), now)
        step |= {"ratio": [round(ratio, 9), round(batching.ratio, 9)]}
        leaving = scheduler.queues.leaving
        chunks = plan is not None and bool(plan.chunks)
        asked = not chunks or batching.mixed_chunk
        finishing = [one.id for one in scheduler.running if asked and one in leaving]
        # Both batches are of prefills; but one with which the decodes began is of decodes by now.
        early = bool(chunks and last and last[1].chunks and config["wait_between_prefills"])
        early &= decoding > 0 or step["kind"] != "mixed"
        lost = [one.request.id for one in plan.preemptions] if plan else []
        tokens = answers(plan, lengths) if plan else {}
        if plan is not None:
            scheduler.dispatch(plan)
        finished: list[Request] = []
        if last is not None:
            finished = completed(scheduler, last[1], last[2], now + 1)
        ended = {one.id for one in finished}
        decoded = [one.id for one in plan.decodes] if plan else []
        launched = plan is not None and not plan.empty
        if plan is not None and not launched:
            scheduler.complete(plan, now + 1, {}, {})
        if tiers:
            step |= tiers.processed(now)
        if now % check_every == 0:
            scheduler.check()
        yield step | {
            "preempted": [one.id for one in plan.displaced] if plan else [],
            "processed": last[0] if last else None,
            "early": early,
            "finishing": finishing,
            "finished": [one.id for one in finished],
            "extra": [name for name in decoded if name in ended],
            "discarded": [name for name in (last[2] if last else ()) if name in lost],
            "reset": idle,
            "free_after": unused(scheduler.memory),
        }
        last = (now, plan, tokens) if launched and plan is not None else None
        now += 1


def completed(
    scheduler: Scheduler, plan: StepPlan, tokens: dict[Any, int], now: int
) -> list[Request]:
    tokens = {one.id: tokens[one.id] for one in sampled_in(plan)}
    ends = {name: "stop" for name, token in tokens.items() if token == STOP}
    return scheduler.complete(plan, now, tokens, ends)


def of_iteration(plan: StepPlan | None, now: int, idle: bool = False) -> Step:
    """What the recordings of whole loops have besides."""
    return {
        "preempted": [one.id for one in plan.displaced] if plan else [],
        "processed": now if plan else None,
        "early": False,
        "extra": [],
        "discarded": [],
        "finishing": [],
        "reset": idle,
    }


def nothing(scheduler: Scheduler, now: int) -> Step:
    """An iteration of the loop without requests."""
    batching = scheduler.batching
    assert isinstance(batching, SGLang)
    ratio = round(batching.ratio, 9)
    step = record(scheduler, StepPlan(0, now), now, None)
    free = unused(scheduler.memory)
    return step | {"ratio": [ratio, ratio], "finished": [], "free_after": free}


def answers(plan: StepPlan, lengths: dict[Any, int]) -> dict[Any, int]:
    sampled = [chunk.request for chunk in plan.chunks if chunk.samples] + [*plan.decodes]
    return {one.id: STOP if one.generated + 1 == lengths[one.id] else GENERATED for one in sampled}


def unused(memory: Memory) -> int:
    return (memory.free - memory.cached) * memory.block_size


def locked(memory: Memory) -> int:
    if not isinstance(memory, RadixMemory):
        return 0

    def below(node: Node) -> int:
        own = len(node.pages) if node.owners else 0
        return own + sum(map(below, node.children.values()))

    return below(memory.root) * memory.block_size


def record(scheduler: Scheduler, plan: StepPlan, now: int, going_on: Request | None) -> Step:
    memory, batching = scheduler.memory, scheduler.batching
    assert isinstance(batching, SGLang)
    fresh = [chunk.request for chunk in plan.chunks]
    decodes = [one.id for one in plan.decodes]
    kind = "mixed" if fresh and decodes else "prefill" if fresh else "decode" if decodes else "idle"
    new = [chunk for chunk in plan.chunks if chunk.request is not going_on]
    # Where decodes were to be built, those are gone whose last token is under way.
    kept = not decodes and bool(fresh) and not batching.mixed_chunk
    apart = {*fresh, batching.chunked, *(() if kept else scheduler.queues.leaving)}
    running = [one.id for one in scheduler.running if one not in apart]
    return {
        "step": now,
        "cached": [[chunk.request.id, chunk.start] for chunk in new],
        "kind": kind,
        "prefill": [[chunk.request.id, chunk.length] for chunk in plan.chunks],
        "prefix": [[chunk.request.id, chunk.start] for chunk in plan.chunks],
        "decode": decodes,
        "retracted": [one.request.id for one in plan.preemptions],
        "aborted": [],
        "chunked": batching.chunked.id if batching.chunked else None,
        "waiting": [one.id for one in scheduler.waiting],
        "running": [] if kind == "mixed" else running,
        "free": unused(memory),
        "evictable": memory.cached * memory.block_size,
        "protected": locked(memory),
        "full": batching.full,
    }
