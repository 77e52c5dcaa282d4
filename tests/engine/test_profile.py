"""How many blocks the engine takes where there is no GPU to be filled."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedsim.core import SamplingParams
from pagedsim.engine import profile
from pagedsim.engine.cache import CacheShape
from pagedsim.engine.profile import fitting_blocks, worst_step
from pagedsim.engine.sampler import Row, Sampler

SHAPE = CacheShape(layers=1, block_size=16, kv_heads=1, head_dim=8, dtype=torch.float32)
BLOCK = 2 * 16 * 8 * 4  # bytes


def blocks(ranks: int, max_model_len: int = 64, max_seqs: int = 1000) -> int:
    model: Any = SimpleNamespace(device=torch.device("cpu"), ranks_count=ranks)
    return fitting_blocks(
        model,
        SHAPE,
        max_model_len=max_model_len,
        max_seqs=max_seqs,
        max_batched_tokens=64,
        utilization=0.9,
        graphs=False,
    )


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred blocks."""
    monkeypatch.setattr(profile, "HOST_POOL", 100 * BLOCK)


@pytest.mark.parametrize(("ranks", "each"), [(1, 100), (2, 50), (8, 12)])
def test_ranks_share_the_host_s_pool(ranks: int, each: int) -> None:
    assert blocks(ranks) == each


def test_no_more_blocks_than_requests_can_use() -> None:
    assert blocks(1, max_model_len=64, max_seqs=3) == 12


def test_one_request_fits_however_small_the_pool() -> None:
    assert blocks(8, max_model_len=1600) == 100


@pytest.mark.parametrize(("seqs", "tokens"), [(5, 40), (40, 40), (64, 40), (1, 40)])
def test_decodes_of_the_worst_step_may_be_as_long_as_any(seqs: int, tokens: int) -> None:
    """How many parts a context may have follows from the width of the tables."""
    seen: list[Any] = []

    def forward(ids: Any, positions: Any, batch: Any, cache: Any, rows: Any) -> Any:
        seen.append((len(ids), batch.num_decodes, tuple(batch.block_tables.shape), len(rows)))
        assert len(cache) == 1 and not batch.block_tables.any()
        return torch.zeros(len(rows), 7)

    model: Any = SimpleNamespace(device=torch.device("cpu"), max_model_len=16 * 30, forward=forward)
    worst_step(model, SHAPE, seqs, tokens, blocks=30)
    count = min(seqs, tokens)
    decodes = count if count == tokens else count - 1
    assert seen == [(tokens, decodes, (count, 30), count)] * 2


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5),
        SamplingParams(top_k=40, top_p=0.9, min_p=0.05),
        SamplingParams(logprobs=5),
        SamplingParams(
            top_k=40,
            top_p=0.9,
            min_p=0.05,
            logprobs=5,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.5,
        ),
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
    worst = peak(lambda: worst_step(model, SHAPE, seqs, 40, blocks=30))
    assert worst >= 4 * seqs * vocab
    assert peak(lambda: Sampler().sample(logits, rows)) <= 1.02 * worst


def test_the_worst_step_is_computed_beside_the_counts_that_penalties_keep() -> None:
    seqs, vocab, needed = 16, 20_000, 10**8

    def forward(*given: object) -> torch.Tensor:
        torch.empty(needed, dtype=torch.uint8)
        return torch.zeros(seqs, vocab)

    model: Any = SimpleNamespace(device=torch.device("cpu"), max_model_len=16 * 30, forward=forward)
    counts = 5 * seqs * vocab  # an int32 and a bool a token
    assert peak(lambda: worst_step(model, SHAPE, seqs, 40, blocks=30)) >= needed + counts


def peak(work: Callable[[], object]) -> int:
    """The most bytes that tensors took at a time."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    # events() of the profiler gives what operators allocated to the operators: not in order of time
    kineto: Any = profiler.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))
