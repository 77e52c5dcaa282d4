"""A tokenizer that needs no files, and a loop that serves requests with any function as a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Continuation, Request, SamplingParams, StepPlan
from pagedsim.core.plan import rebuilds
from pagedsim.engine.inflight import SamplingJob, StepResults
from pagedsim.engine.output import RequestOutput
from pagedsim.engine.sampler import Sampler
from pagedsim.engine.sequence import Group, make_group
from tests.core.shadow import Shadow

Model = Callable[[list[list[int]]], Tensor]
"""Logits after each of some texts; the texts of one call are equally long."""


def noisy(vocab: int, *, spread: float = 2.0) -> Model:
    """A model whose logits are random, but always the same after the same text."""

    def logits(texts: list[list[int]]) -> Tensor:
        rows = []
        for text in texts:
            generator = torch.Generator().manual_seed(crc32(bytes(text)))
            rows.append(torch.randn(vocab, generator=generator) * spread)
        return torch.stack(rows)

    return logits


def answers(
    logits: Tensor,
    samplers: list[tuple[Request, int]],
    groups: Mapping[Any, Group],
    sampler: Sampler,
) -> StepResults:
    """Ask, draw and answer in one."""
    question = SamplingJob(samplers, groups)
    question.draw(logits, sampler)
    return question.results()


class Letters:
    """A tokenizer whose token i is the i-th letter of the alphabet."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


class Words:
    """Turns token i into the i-th of some pieces of text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return ""


class Loop:
    """An engine without a cache: each step computes whole texts anew.

    What a cache would have held is looked at by a shadow, so that no sequence reads another's past.
    """

    def __init__(
        self,
        model: Model,
        *,
        eos: Collection[int] = (),
        seed: int = 1,
        blocks: int = 200,
        **settings: Any,
    ) -> None:
        """`settings` are the scheduler's: batching, preemption, max_seqs, ..."""
        cpu = settings.pop("cpu_blocks", 0)
        kind = settings.pop("memory", "paged")
        memory = make_memory(kind, blocks=blocks, block_size=4, cpu_blocks=cpu)
        self.scheduler = make_scheduler(
            memory=memory, **{"batching": "prefill_first", "max_seqs": 16, **settings}
        )
        self.model, self.eos, self.seed = model, eos, seed
        self.sampler = Sampler()
        self.groups: dict[Any, Group] = {}
        self.outputs: dict[Any, RequestOutput] = {}
        self.shadow = Shadow(memory)
        self.preempted = 0
        self.rebuilt = 0
        """Chunks that computed what groups had lost."""
        self.now = 0.0

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> Request:
        request = Request(name, prompt, params)
        self.groups[name] = make_group(
            request, tokenizer=Letters(), eos=self.eos, seed=self.seed, number=len(self.groups)
        )
        self.scheduler.add(request, self.now)
        self.shadow.add(request)
        return request

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        assert not plan.rejected, plan.rejected
        self.preempted += len(plan.preempted) + len(plan.displaced)
        self.rebuilt += sum(rebuilds(chunk.request) for chunk in plan.chunks)
        self.shadow.execute(plan)
        logits, samplers = self.execute(plan)
        tokens, finished = answers(logits, samplers, self.groups, self.sampler)
        for request, _ in samplers:
            self._remember(request, tokens[request.id])
        self.now += 1
        for request in self.scheduler.commit(plan, self.now, tokens, finished):
            group = self.groups[request.id]
            group.close(request.finish_reason or "")
            self.outputs[request.id] = group.output(finished=True)
        self.scheduler.check()
        self.shadow.scrub(self.scheduler.requests.values(), self.scheduler.queues.copies)

    def _remember(self, request: Request, answer: int | Continuation) -> None:
        tokens, parents = answer if isinstance(answer, Continuation) else ((answer,), None)
        self.shadow.sampled(request, tokens, parents or range(len(tokens)))

    def execute(self, plan: StepPlan) -> tuple[Tensor, list[tuple[Request, int]]]:
        requests = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]
        logits = [
            self.model([[*(request.prompt or ()), *line] for line in request.outputs or [[]]])
            for request in requests
        ]
        samplers = [(r, len(rows)) for r, rows in zip(requests, logits, strict=True)]
        return torch.cat(logits) if logits else torch.empty(0, 1), samplers

    def run(self, limit: int = 2000) -> dict[Any, RequestOutput]:
        """Until no request is left."""
        for _ in range(limit):
            if not self.scheduler.unfinished:
                return self.outputs
            self.step()
        raise AssertionError(f"{self.scheduler.unfinished} requests left after {limit} steps")
