"""Copies from and to a host tier change no token, whenever they end, and whether they fail."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.core.transfers import Direction, EndedCopy
from pagedsim.engine.cache import Mark
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.host_copies import HostCopies
from pagedsim.engine.step_inputs import HostCopy
from tests.engine.test_cache_memory import SlowBus
from tests.engine.test_equality import GREEDY, PROMPTS, prompts, small, wanted

Contents = dict[tuple[Hashable, int], torch.Tensor]
"""By the key of a chunk, and the number of a block in it."""


class Failing(SlowBus):
    """Some copies raise an error instead."""

    def __init__(self, rng: random.Random, haste: float, failing: float) -> None:
        super().__init__(rng, haste)
        self.failing, self.failed = failing, 0

    def queue(self, work: Callable[[], None]) -> Any:
        if self.rng.random() < self.failing:
            self.failed += 1
            raise RuntimeError("the bus is off")
        return super().queue(work)


class Shadow(HostCopies):
    """Knows what is in each chunk, and looks at all that was copied."""

    def __init__(self, engine: LLMEngine, *buses: SlowBus) -> None:
        stores, loads = buses
        super().__init__(engine.runner.cache, buses=(stores, loads))
        connector = engine.scheduler.queues.connector
        assert connector is not None
        self.connector = connector
        self.contents: Contents = {}
        self.checked = {Direction.LOAD: 0, Direction.STORE: 0}

    def _named(self, copy: HostCopy) -> Iterator[tuple[tuple[Hashable, int], int, int]]:
        """Each block with its key, and its places on the GPU and the host."""
        chunks = self.connector.jobs[copy.job].chunks
        per = self.connector.blocks_per_chunk
        names = [(chunk.key, block) for chunk in chunks for block in range(per)]
        for name, pair in zip(names[-len(copy.pairs) :], copy.pairs, strict=True):
            gpu, host = pair if copy.direction is Direction.STORE else pair[::-1]
            yield name, gpu, host

    def _begin(self, copy: HostCopy, lane: int) -> None:
        if copy.direction is Direction.STORE:
            for name, gpu, _ in self._named(copy):
                content = self._cache.gpu[gpu].clone()
                if (before := self.contents.get(name)) is not None:
                    torch.testing.assert_close(content, before)
                self.contents[name] = content
        super()._begin(copy, lane)

    def _report(self, number: int) -> EndedCopy:
        copy = self._jobs[number].copy
        ended = super()._report(number)
        if ended.error is None:
            self.checked[copy.direction] += len(copy.pairs)
            for name, gpu, host in self._named(copy):
                if copy.direction is Direction.STORE:
                    torch.testing.assert_close(self._cache.cpu[host], self.contents[name])
                else:
                    torch.testing.assert_close(self._cache.gpu[gpu], self.contents[name])
        return ended


@dataclass
class Case:
    """An engine with little memory, and a host tier."""

    rng: random.Random
    failing: float = 0.0
    aborting: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    offload: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice = self.rng.choice
        offload = {
            "chunks": choice((3, 8, 40)),
            "blocks_per_chunk": choice((1, 1, 2)),
            "eviction": choice(("lru", "arc")),
            "store_threshold": choice((0, 0, 2)),
            "prompt_only": choice((True, False)),
            "sync_tokens": choice((0, 0, 8, 100)),
        }
        self.engine = small(
            "llama",
            **{
                "batching": "unified",
                "cpu_blocks": 0,
                "blocks": choice((10, 10, 24)),
                "memory": choice(("paged", "prefix", "prefix")),
                "policy": choice(("fcfs", "priority")),
                "max_batched_tokens": choice((8, 32)),
                "async_scheduling": choice((False, True)),
                "offload": offload | dict(self.offload),
                **self.settings,
            },
        )
        self.buses = [Failing(self.rng, choice((0.05, 0.3, 1.0)), self.failing) for _ in range(2)]
        self.shadow = Shadow(self.engine, *self.buses)
        self.engine.runner.copies = self.shadow

    def serve(self, count: int = 24) -> dict[int, Sequence[int]]:
        """Requests for prompts that come again and again; returns the tokens of those that end."""
        engine, rng = self.engine, self.rng
        ended: dict[int, Sequence[int]] = {}
        sent = 0
        while sent < count or engine.has_unfinished_requests():
            if sent < count and rng.random() < 0.3:
                engine.add_request(sent, prompts()[self.prompt(sent)], GREEDY, priority=sent % 3)
                sent += 1
            alive = [*engine.scheduler.requests]
            if alive and rng.random() < self.aborting:
                engine.abort_request(rng.choice(alive))
            for output in engine.step():
                assert output.outputs[0].finish_reason == "length"
                ended[int(output.request_id)] = output.outputs[0].token_ids
            engine.scheduler.check()
        return ended

    @staticmethod
    def prompt(number: int) -> int:
        return number * 5 % PROMPTS

    def check(self, ended: Mapping[int, Sequence[int]]) -> None:
        """Tokens are right, and nothing is left in flight or in use."""
        for number, tokens in ended.items():
            assert list(tokens) == wanted("llama")[self.prompt(number)]
        scheduler, connector = self.engine.scheduler, self.shadow.connector
        assert scheduler.memory.free == scheduler.memory.total
        assert not connector.transferring and not self.engine.copying
        assert not connector.host.writing and not connector.host.reading
        assert not any(bus.waiting for bus in self.buses)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= 8)) for n in range(200)]
)
def test_tokens_and_contents_are_the_same(seed: int) -> None:
    case = Case(random.Random(seed), aborting=(0.0, 0.05)[seed % 2])
    ended = case.serve()
    assert len(ended) == 24 or seed % 2
    case.check(ended)
    assert case.shadow.checked[Direction.STORE] > 0


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= 4)) for n in range(40)]
)
def test_copies_that_fail_lose_no_request(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(random.Random(seed), failing=0.3, aborting=(0.0, 0.05)[seed % 2])
    with caplog.at_level(logging.WARNING):
        ended = case.serve()
    assert len(ended) == 24 or seed % 2
    case.check(ended)
    assert sum(bus.failed for bus in case.buses) > 1
    (line,) = (record.getMessage() for record in caplog.records)
    assert "host tier failed (RuntimeError: the bus is off)" in line
