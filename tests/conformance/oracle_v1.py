"""The scheduler of vLLM V1 (0.33): continuous batching, chunked prefill, prefix caching.

There is neither a prefill phase nor a decode phase. A request has tokens, and the KV cache has keys
and values of the first `num_computed_tokens` of them; each step lets requests catch up. So a chunk
of a prompt, a decode and the recomputation after a preemption are one case: `num_new_tokens`.

Names are vLLM's, the code is not, and nothing here is fast: the free list is a list that is
searched, and every step looks at every request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Step: TypeAlias = dict[str, Any]
"""What one call has decided, as it is recorded."""


@dataclass(eq=False)
class Request:
    """A request, its tokens, and its blocks of the KV cache."""

    request_id: int
    priority: tuple[int, int]  # then the arrival: the smallest goes first
    token_ids: list[int]  # the prompt, followed by the sampled tokens
    max_len: int  # the length at which it finishes
    num_computed_tokens: int = 0  # those of steps in flight count as computed
    num_output_placeholders: int = 0  # tokens that steps in flight will sample
    num_preemptions: int = 0
    was_scheduled: bool = False
    block_ids: list[int] = field(default_factory=list)  # the block table
    num_cached_blocks: int = 0  # so many of its blocks, from the first on, can be found by hash
    block_hashes: list[int] = field(default_factory=list)  # of its full blocks, as far as needed

    @property
    def num_tokens(self) -> int:
        """Its length, with the tokens that steps in flight will sample."""
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_new_tokens(self) -> int:
        """Tokens to compute until it can sample: many of a prompt, one where it decodes."""
        return self.num_tokens - self.num_computed_tokens


# -- a step ----------------------------------------------------------------------------------------


@dataclass
class SchedulerOutput:
    """The decisions of one step."""

    token_budget: int  # what is left of it
    num_scheduled_tokens: dict[Request, int] = field(default_factory=dict)
    num_cached_tokens: dict[Request, int] = field(default_factory=dict)  # hits of new requests
    preempted: list[Request] = field(default_factory=list)

    def schedule(self, request: Request, num_tokens: int) -> None:
        """Let a request compute so many tokens."""
        self.num_scheduled_tokens[request] = num_tokens
        self.token_budget -= num_tokens


class InFlight(NamedTuple):
    """What a step in flight computes of one request."""

    request: Request
    num_tokens: int
    samples: bool
    num_preemptions: int  # of the request, when the step was scheduled


class Scheduler:
    """Two queues, and the KV cache. `evict_uncomputed`: see `preempt`."""

    def __init__(self, config: dict[str, Any], evict_uncomputed: bool) -> None:
        self.kv_cache = KVCacheManager(
            config["gpu_blocks"], config["block_size"], bool(config.get("prefix_caching"))
        )
        self.max_num_running_reqs: int = config["max_seqs"]
        self.max_num_scheduled_tokens: int = config["max_batched_tokens"]
        self.by_priority = config.get("policy") == "priority"  # else first come, first served
        self.evict_uncomputed = evict_uncomputed
        self.waiting: list[Request] = []  # new and preempted requests, the next one first
        self.running: list[Request] = []  # in the order in which they were admitted
        self.in_flight: deque[list[InFlight]] = deque()  # one step; two with async scheduling

    def schedule(self) -> Step:
        """Decide a step: running requests first, then waiting ones unless memory is short."""
        output = SchedulerOutput(self.max_num_scheduled_tokens)
        self.sort_waiting()
        self.schedule_running(output)
        self.sort_waiting()
        if not output.preempted:
            self.schedule_waiting(output)
        step = self.recorded(output)
        self.update_after_schedule(output)
        return step

    def schedule_running(self, output: SchedulerOutput) -> None:
        """Each running request catches up within the token budget; where blocks are lacking,
        others are preempted for it, and in the end itself."""
        for request in self.running[:]:
            if request not in self.running or not output.token_budget:
                continue  # preempted for another one; or no budget is left
            if request.num_output_placeholders and request.num_tokens >= request.max_len:
                continue  # finishes with a token that is in flight
            num_new_tokens = min(request.num_new_tokens, output.token_budget)
            while request in self.running:
                if self.kv_cache.allocate_slots(request, num_new_tokens):
                    output.schedule(request, num_new_tokens)
                    break
                self.preempt(self.victim(), output)

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit waiting requests in order, until one has no room: no other one overtakes it. The
        last one may get a chunk of its prompt, but all of its prompt has to fit."""
        while self.waiting and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            computed_blocks = self.kv_cache.get_computed_blocks(request)
            if not output.token_budget or not self.kv_cache.fits(request, computed_blocks):
                break
            self.kv_cache.touch(request, computed_blocks)
            if computed_blocks and not request.was_scheduled:
                output.num_cached_tokens[request] = request.num_computed_tokens
            num_new_tokens = min(request.num_new_tokens, output.token_budget)
            self.kv_cache.allocate_slots(request, num_new_tokens)
            output.schedule(request, num_new_tokens)
            request.was_scheduled = True
            self.running.append(self.waiting.pop(0))

    def victim(self) -> Request:
        """The running request to preempt: the last one admitted, or the least urgent."""
        if self.by_priority:
            return max(self.running, key=lambda request: request.priority)
        return self.running[-1]

    def preempt(self, victim: Request, output: SchedulerOutput) -> None:
        """Free all blocks of a request, to be recomputed; it waits before all others.

        If it was scheduled in this step, its tokens go back to the budget. Then it has blocks in
        the prefix cache that no step will compute: vLLM leaves them there, pagedsim evicts them
        (`evict_uncomputed`).
        """
        self.running.remove(victim)
        output.token_budget += output.num_scheduled_tokens.pop(victim, 0)
        output.preempted.append(victim)
        if self.evict_uncomputed:
            first = victim.num_computed_tokens // self.kv_cache.block_size
            for block in victim.block_ids[first : victim.num_cached_blocks]:
                self.kv_cache.evict(block)
        self.kv_cache.free(victim)
        victim.num_computed_tokens = victim.num_output_placeholders = 0
        victim.num_preemptions += 1
        self.waiting.insert(0, victim)

    def sort_waiting(self) -> None:
        """By priority preempted requests do not wait before all others, but in their place."""
        if self.by_priority:
            self.waiting.sort(key=lambda request: request.priority)

    def update_after_schedule(self, output: SchedulerOutput) -> None:
        """The step is in flight: its tokens count as computed, so that the next one can be
        scheduled before it ends. A request that has caught up samples a token."""
        step: list[InFlight] = []
        for request, num_tokens in output.num_scheduled_tokens.items():
            request.num_computed_tokens += num_tokens
            samples = request.num_new_tokens == 0
            request.num_output_placeholders += samples
            step.append(InFlight(request, num_tokens, samples, request.num_preemptions))
        self.in_flight.append(step)

    def update_from_output(self) -> Step:
        """The oldest step in flight has ended: append its tokens, and free finished requests."""
        sampled: list[list[int]] = []
        finished: list[int] = []
        for request, _, samples, num_preemptions in self.in_flight.popleft():
            if not samples:
                continue
            request.token_ids.append(7)  # what a model samples does not matter here
            sampled.append([request.request_id, 1])
            if num_preemptions == request.num_preemptions:  # else this token is recomputed
                request.num_output_placeholders -= 1
                self.kv_cache.cache_blocks(request, self.num_stored_tokens(request))
            if len(request.token_ids) >= request.max_len:
                self.kv_cache.free(request)
                (self.running if request in self.running else self.waiting).remove(request)
                finished.append(request.request_id)
        return {"output": sampled, "finished": finished}

    def num_stored_tokens(self, request: Request) -> int:
        """Tokens whose keys and values are in the KV cache now: without those in flight."""
        return request.num_computed_tokens - sum(
            part.num_tokens
            for step in self.in_flight
            for part in step
            if part.request is request and part.num_preemptions == request.num_preemptions
        )

    def recorded(self, output: SchedulerOutput) -> Step:
        """The decisions, and what they leave, by the ids of requests."""
        return {
            "scheduled": [[r.request_id, n] for r, n in output.num_scheduled_tokens.items()],
            "cached": [[r.request_id, n] for r, n in output.num_cached_tokens.items()],
            "preempted": sorted(request.request_id for request in output.preempted),
            "waiting": [request.request_id for request in self.waiting],
            "running": [request.request_id for request in self.running],
            "free": len(self.kv_cache.free_block_queue),
        }


# -- the KV cache ----------------------------------------------------------------------------------


class KVCacheManager:
    """The blocks of the KV cache. Full ones can be found by the hash of their tokens, also when
    they are free, until they are allocated again: the free list is in the order of eviction."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.free_block_queue = list(range(num_blocks))  # the next to be allocated first
        self.ref_cnt = [0] * num_blocks  # requests that share each block
        self.block_hash: list[int | None] = [None] * num_blocks
        self.cached_blocks: dict[int, list[int]] = {}  # by hash, the first one cached first
        self.hash_of_content: dict[tuple[int, tuple[int, ...]], int] = {}

    def hash(self, request: Request, index: int) -> int:
        """A number for the tokens of a full block and of all blocks before it; vLLM's is a hash,
        here each content has its own."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            begin = len(hashes) * self.block_size
            tokens = tuple(request.token_ids[begin : begin + self.block_size])
            content = (hashes[-1] if hashes else -1, tokens)
            hashes.append(self.hash_of_content.setdefault(content, len(self.hash_of_content)))
        return hashes[index]

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The cached blocks with which a request begins; its last token is computed in any case,
        for without it there is nothing to sample from."""
        blocks: list[int] = []
        full = (len(request.token_ids) - 1) // self.block_size if self.enable_caching else 0
        for index in range(full):
            cached = self.cached_blocks.get(self.hash(request, index))
            if not cached:
                break
            blocks.append(cached[0])
        return blocks

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def fits(self, request: Request, computed_blocks: list[int]) -> bool:
        """Whether all tokens of a request fit beside the blocks that were found for it, of which
        those without a request are on the free list."""
        needed = self.num_blocks(len(request.token_ids)) - len(computed_blocks)
        unused = [block for block in computed_blocks if not self.ref_cnt[block]]
        return needed <= len(self.free_block_queue) - len(unused)

    def touch(self, request: Request, computed_blocks: list[int]) -> None:
        """A request begins with cached blocks, which leave the free list."""
        for block in computed_blocks:
            if not self.ref_cnt[block]:
                self.free_block_queue.remove(block)
            self.ref_cnt[block] += 1
        request.block_ids, request.num_cached_blocks = computed_blocks, len(computed_blocks)
        request.num_computed_tokens = len(computed_blocks) * self.block_size

    def allocate_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Blocks for so many more tokens, or none if there are too few. Those that the tokens fill
        are cached at once, so a request of the same step can share them."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        missing = self.num_blocks(num_tokens) - len(request.block_ids)
        if missing > len(self.free_block_queue):
            return False
        for _ in range(missing):
            block = self.free_block_queue.pop(0)
            self.evict(block)
            self.ref_cnt[block] = 1
            request.block_ids.append(block)
        self.cache_blocks(request, num_tokens)
        return True

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let the full blocks of its first tokens be found, as far as these are sampled."""
        known = min(num_tokens, len(request.token_ids))
        full = known // self.block_size if self.enable_caching else 0
        for index in range(request.num_cached_blocks, full):
            block = request.block_ids[index]
            self.block_hash[block] = self.hash(request, index)
            self.cached_blocks.setdefault(self.hash(request, index), []).append(block)
        request.num_cached_blocks = max(request.num_cached_blocks, full)

    def free(self, request: Request) -> None:
        """Give its blocks back, the last one first, so that the end of a prefix is evicted before
        its beginning. Blocks without a hash are of no use, and the next to be allocated."""
        for block in reversed(request.block_ids):
            self.ref_cnt[block] -= 1
            if not self.ref_cnt[block]:
                place = 0 if self.block_hash[block] is None else len(self.free_block_queue)
                self.free_block_queue.insert(place, block)
        request.block_ids, request.num_cached_blocks = [], 0

    def evict(self, block: int) -> None:
        """Let a block no longer be found."""
        if (block_hash := self.block_hash[block]) is not None:
            self.cached_blocks[block_hash].remove(block)
            self.block_hash[block] = None


# -- the loop around it ----------------------------------------------------------------------------


def simulate(
    config: dict[str, Any], workload: list[dict[str, Any]], evict_uncomputed: bool = False
) -> Iterator[Step]:
    """Every step of a workload, in which requests arrive before steps, until all are finished."""
    scheduler = Scheduler(config, evict_uncomputed)
    arrivals: deque[tuple[int, Request]] = deque()
    for number, row in sorted(enumerate(workload), key=lambda pair: _arrival(pair[1])):
        token_ids = prompt(row)
        max_len = min(len(token_ids) + row["output_len"], config["max_model_len"])
        request = Request(row["id"], (row.get("priority", 0), number), token_ids, max_len)
        arrivals.append((row["arrival_step"], request))
    run = _async_step if config.get("async_scheduling") else _step
    now, any_finished = 0, False
    while arrivals or scheduler.waiting or scheduler.running or scheduler.in_flight:
        while arrivals and arrivals[0][0] <= now:
            scheduler.waiting.append(arrivals.popleft()[1])
        if scheduler.waiting or scheduler.running or scheduler.in_flight:
            step = {"step": now} | run(scheduler, now, any_finished)
            any_finished = bool(step["finished"])
            yield step
        now += 1


def _arrival(row: dict[str, Any]) -> tuple[int, int]:
    return row["arrival_step"], row["id"]


def prompt(row: dict[str, Any]) -> list[int]:
    """The tokens of a prompt; where only its length is known, it shares none with others."""
    spans = row.get("prompt") or [[-1 - row["id"], row["prompt_len"]]]
    tokens = [stream * 100_003 + i for stream, length in spans for i in range(length)]
    return tokens[: row["prompt_len"]]


def _step(scheduler: Scheduler, now: int, any_finished: bool) -> Step:
    """A step ends before the next one is scheduled."""
    step = scheduler.schedule() | scheduler.update_from_output()
    del step["output"]
    return step


def _async_step(scheduler: Scheduler, now: int, any_finished: bool) -> Step:
    """With async scheduling a step is scheduled while the one before is computed, which ends then.

    After the last requests have finished, an empty step tells vLLM's workers so.
    """
    previous = bool(scheduler.in_flight)
    unfinished = scheduler.waiting or scheduler.running
    step = scheduler.schedule() if unfinished or any_finished else {}
    if not previous:
        return step | {"updated": None, "output": [], "finished": []}
    return step | {"updated": now - 1} | scheduler.update_from_output()
