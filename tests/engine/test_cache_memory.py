"""The cache's memory: blocks that move, pinned memory on the host, and how many blocks fit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedsim.core import SamplingParams, StepPlan
from pagedsim.engine import profile
from pagedsim.engine.cache import (
    Bus,
    Cache,
    CacheShape,
    Mark,
    Mover,
    copy_pieces,
    copy_runs,
    pinned,
)
from pagedsim.engine.profile import fitting_blocks, worst_step
from pagedsim.engine.sampler import Row, Sampler
from tests.engine.test_equality import served, small, tokens, total, wanted

# Blocks that move: they are byte for byte what they were

SHAPE = CacheShape(layers=2, block_size=4, kv_heads=1, head_dim=3, dtype=torch.float32)
BLOCKS, CPU_BLOCKS = 12, 9


class SlowBus(Bus):
    """Executes queued copies when they are waited for, and otherwise at random times."""

    def __init__(self, rng: random.Random, haste: float = 0.2) -> None:
        self.rng, self.haste = rng, haste
        self.waiting: list[Queued] = []
        self.held = 0

    def follow(self) -> None:
        """The computation is at once."""

    def queue(self, work: Callable[[], None]) -> Queued:
        self.waiting.append(Queued(self, work))
        return self.waiting[-1]

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, Queued)
        while mark in self.waiting:
            self.held += 1
            self.go_on()

    def go_on(self) -> None:
        """Do what comes first."""
        self.waiting.pop(0).work()


class Queued:
    seconds = 1.0

    def __init__(self, bus: SlowBus, work: Callable[[], None]) -> None:
        self.bus, self.work = bus, work

    def query(self) -> bool:
        if self.bus.waiting and self.bus.rng.random() < self.bus.haste:
            self.bus.go_on()
        return self not in self.bus.waiting

    def wait(self) -> None:
        self.bus.hold(self)


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize("memory", ["paged", "prefix"])
def test_steps_go_on_while_blocks_go_out(batching: str, memory: str) -> None:
    """However late the bus is, nothing is overwritten before it has gone."""
    held, swapped = 0, 0
    for seed in range(2):
        bus = SlowBus(random.Random(seed))
        engine = small("llama", batching=batching, memory=memory, preemption="swap")
        engine.runner.mover = Mover(engine.runner.cache, bus=bus)
        outputs = served(engine)
        assert tokens(outputs) == wanted("llama")
        held, swapped = held + bus.held, swapped + total(outputs, "swapped_blocks")
    assert swapped > 20 and held > 2


def test_a_step_waits_for_what_it_writes_to_alone() -> None:
    cache, bus = Cache(SHAPE, BLOCKS, CPU_BLOCKS, torch.device("cpu")), SlowBus(Never())
    mover, plan = Mover(cache, bus=bus), StepPlan(number=0, now=0.0)
    plan._swap_out = tuple((block, block) for block in range(4))
    mover.move(plan, lambda: {2})
    assert (bus.held, len(bus.waiting)) == (1, 1)  # block 2 has gone, the three others are going
    mover.move(StepPlan(number=1, now=0.0), lambda: {5, 6})
    assert (bus.held, len(bus.waiting)) == (1, 1)
    mover.move(StepPlan(number=2, now=0.0), lambda: {3})
    assert (bus.held, len(bus.waiting)) == (2, 0)


class Never(random.Random):
    def random(self) -> float:
        return 1.0


@pytest.mark.parametrize("copy", [copy_runs, copy_pieces])
def test_pairs_move_and_nothing_else(copy: Callable[..., None]) -> None:
    rng = random.Random(5)
    for _ in range(200):
        count = rng.randint(1, 10)
        pairs = list(zip(rng.sample(range(12), count), rng.sample(range(12), count), strict=True))
        pairs.sort(key=lambda pair: pair[rng.randint(0, 1)])
        source, target = torch.rand(12, *SHAPE.block), torch.zeros(12, *SHAPE.block)
        copy(source, target, pairs)
        for origin, place in pairs:
            assert torch.equal(target[place], source[origin])
        untouched = set(range(12)) - {place for _, place in pairs}
        assert not target[sorted(untouched)].any()


# Pinned memory; CUDA is a stand-in

CUDA = torch.device("cuda")
NEEDED = 20 * SHAPE.block_bytes


class Owner:
    """Its owner."""


class Cudart:
    """Registers memory, or does not."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[Any] = []

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        self.calls.append(("register", place, size))
        return self.code

    def cudaHostUnregister(self, place: int) -> int:
        self.calls.append(("unregister", place))
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudart]:
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: cudart.calls.append(("wait", device))
    )
    yield cudart


def test_memory_is_registered_as_it_is_and_given_back(cuda: Cudart) -> None:
    assert pinned((0, 3), SHAPE.dtype, CUDA, Owner()).shape == (0, 3)
    assert not cuda.calls
    owner = Owner()
    tensor = pinned((20, *SHAPE.block), SHAPE.dtype, CUDA, owner)
    place = tensor.data_ptr()
    assert (tensor.nbytes, tensor.dtype) == (NEEDED, SHAPE.dtype)
    assert cuda.calls == [("register", place, NEEDED)]
    del owner
    gc.collect()
    assert cuda.calls[1:] == [("wait", CUDA), ("unregister", place)]


# How many blocks fit

BLOCK = CacheShape(layers=1, block_size=16, kv_heads=1, head_dim=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("ranks", "max_model_len", "max_seqs", "fitting"),
    [
        (1, 64, 1000, 100),
        (2, 64, 1000, 50),
        (8, 64, 1000, 12),
        (1, 64, 3, 12),
        (8, 1600, 1000, 100),
    ],
)
def test_blocks_that_fit_the_pool_of_a_host(
    ranks: int, max_model_len: int, max_seqs: int, fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks share it; no more than requests can use, and one request fits however small it is."""
    monkeypatch.setattr(profile, "HOST_POOL", 100 * BLOCK.block_bytes)
    model: Any = SimpleNamespace(device=torch.device("cpu"), ranks_count=ranks)
    found = fitting_blocks(
        model, BLOCK, max_model_len=max_model_len, max_seqs=max_seqs, max_batched_tokens=64,
        utilization=0.9, graphs=False,
    )  # fmt: skip
    assert found == fitting


@pytest.mark.parametrize(("seqs", "tokens"), [(5, 40), (40, 40), (64, 40), (1, 40)])
def test_decodes_of_the_worst_step_may_be_as_long_as_any(seqs: int, tokens: int) -> None:
    """How many parts a context may have follows from the width of the tables."""
    seen: list[Any] = []

    def forward(ids: Any, positions: Any, batch: Any, cache: Any, rows: Any) -> Any:
        seen.append((len(ids), batch.num_decodes, tuple(batch.block_tables.shape), len(rows)))
        assert len(cache) == 1 and not batch.block_tables.any()
        return torch.zeros(len(rows), 7)

    model: Any = SimpleNamespace(device=torch.device("cpu"), max_model_len=16 * 30, forward=forward)
    worst_step(model, BLOCK, seqs, tokens, blocks=30)
    count = min(seqs, tokens)
    decodes = count if count == tokens else count - 1
    assert seen == [(tokens, decodes, (count, 30), count)] * 2


CUTS: dict[str, Any] = {"top_k": 40, "top_p": 0.9, "min_p": 0.05}
PENALTIES: dict[str, Any] = {
    **{"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}
}


@pytest.mark.parametrize(
    "params",
    [
        *(SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(**PENALTIES)),
        *(SamplingParams(**CUTS), SamplingParams(logprobs=5)),
        SamplingParams(logprobs=5, **CUTS, **PENALTIES),
    ],
    ids=["usual", "greedy", "penalties", "cuts", "logprobs", "all"],
)
def test_no_sampling_takes_more_than_the_worst_step(params: SamplingParams) -> None:
    seqs, vocab = 16, 20_000
    logits = torch.randn(seqs, vocab)
    rows = [Row(params, 7, position=3, prompt=[1, 2], output=[3], forbidden=(5,))] * seqs
    model: Any = SimpleNamespace(
        device=torch.device("cpu"), max_model_len=16 * 30, forward=lambda *_: logits
    )
    worst = peak(lambda: worst_step(model, BLOCK, seqs, 40, blocks=30))
    assert worst >= 4 * seqs * vocab
    assert peak(lambda: Sampler().sample(logits, rows)) <= 1.02 * worst


def peak(work: Callable[[], object]) -> int:
    """The most bytes that tensors took at a time."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    # events() of the profiler gives what operators allocated to the operators: not in order of time
    kineto: Any = profiler.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))
