"""A small server to drive step by step, and its plans in a form that fits a line.

    server = Server(blocks=4, block_size=4)  # decides as vLLM 0.6.6 does
    server.add("a", 6)
    server.step() == {"prefill": {"a": 6}}
    server.step() == {"decode": ["a"]}

Every step is carried out at once, one second long, and followed by `check()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedsim.build import make_scheduler
from pagedsim.core import (
    Batching,
    Continuation,
    Memory,
    PagedMemory,
    Policy,
    Preemption,
    PrefillFirst,
    PrefixMemory,
    Request,
    RequestId,
    SamplingParams,
    Scheduler,
    StepPlan,
)

Step = dict[str, Any]
Tokens = Mapping[RequestId, int | Continuation]


class Server:
    """A scheduler made from short arguments. The watermark is 0 unless it is given."""

    def __init__(
        self,
        blocks: int = 100,
        block_size: int = 4,
        *,
        cpu_blocks: int = 0,
        cache: bool = False,
        memory: Memory | None = None,
        batching: str | Batching = "prefill_first",
        watermark: float = 0.0,
        policy: str | Policy = "fcfs",
        preemption: str | Preemption = "recompute",
        max_seqs: int = 8,
        budget: int | None = None,
        max_model_len: int | None = None,
        async_scheduling: bool = False,
    ) -> None:
        if memory is None:
            memory = (PrefixMemory if cache else PagedMemory)(blocks, block_size, cpu_blocks)
        self.memory = memory
        self.scheduler: Scheduler = make_scheduler(
            memory=memory,
            policy=policy,
            preemption=preemption,
            batching=PrefillFirst(watermark) if batching == "prefill_first" else batching,
            max_seqs=max_seqs,
            max_batched_tokens=budget,
            max_model_len=max_model_len,
            async_scheduling=async_scheduling,
        )
        self.now = 0.0

    def add(
        self,
        name: str,
        prompt: int | Sequence[int],
        output: int | None = None,
        *,
        n: int = 1,
        beams: int = 0,
        max_tokens: int | None = None,
        **knows: Any,
    ) -> Request:
        """Queue a request that ends after `output` tokens, or never while the test looks on."""
        params = SamplingParams(n=beams or n, beam_search=beams > 0, max_tokens=max_tokens)
        request = Request(name, prompt, params, **knows)
        self.scheduler.add(request, self.now, output)
        return request

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        return plan

    def commit(
        self,
        plan: StepPlan,
        tokens: Tokens | None = None,
        finished: Mapping[RequestId, str] | None = None,
        parents: Mapping[RequestId, Sequence[int]] | None = None,
    ) -> list[str]:
        """The plan was carried out; the names of those that it finished."""
        self.now += 1
        ended = self.scheduler.commit(plan, self.now, tokens, finished, parents)
        self.scheduler.check()
        return names(ended)

    def step(self, tokens: Tokens | None = None) -> Step:
        """Plan and commit; what the step did, without what it did not do."""
        plan = self.plan()
        done = shown(plan)
        if ended := self.commit(plan, tokens):
            done["finished"] = ended
        return done

    def steps(self, count: int) -> list[Step]:
        return [self.step() for _ in range(count)]

    def drain(self, limit: int = 1000) -> list[str]:
        """Step until no request is left; all that finished, in order."""
        ended: list[str] = []
        for _ in range(limit):
            if not self.scheduler.unfinished:
                return ended
            ended += self.step().get("finished", [])
        raise AssertionError(f"after {limit} steps there still are {self.queues}")

    @property
    def waiting(self) -> list[str]:
        return names(self.scheduler.waiting)

    @property
    def running(self) -> list[str]:
        return names(self.scheduler.running)

    @property
    def swapped(self) -> list[str]:
        return names(self.scheduler.swapped)

    @property
    def queues(self) -> dict[str, list[str]]:
        """The queues that are not empty."""
        queues = {"waiting": self.waiting, "running": self.running, "swapped": self.swapped}
        return {name: queue for name, queue in queues.items() if queue}

    @property
    def free(self) -> int:
        return self.memory.free


def names(requests: Iterable[Request]) -> list[str]:
    return [str(request.id) for request in requests]


def shown(plan: StepPlan) -> Step:
    """What a plan does, block ids and positions left out."""
    prefill: dict[str, int] = {}
    for chunk in plan.chunks:
        name = str(chunk.request.id)
        prefill[name] = prefill.get(name, 0) + chunk.length
    done: Step = {
        "prefill": prefill,
        "decode": names(plan.decodes),
        "held": names(plan.held),
        "preempted": names(plan.preempted),
        "displaced": names(plan.displaced),
        "resumed": names(plan.resumed),
        "rejected": names(request for request, _ in plan.rejected),
        "swap_out": len(plan.swap_out),
        "swap_in": len(plan.swap_in),
        "copies": len(plan.copies),
        "hits": {str(request.id): tokens for request, tokens in plan.hits if tokens},
    }
    return {name: value for name, value in done.items() if value}
