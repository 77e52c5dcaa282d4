"""Drawing on a GPU: the host waits for nothing, and the tokens are those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pagedsim.core import SamplingParams
from pagedsim.engine.sampler import Row, Sampler, stream_key

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SETTINGS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=50),
    "large top_k": SamplingParams(top_k=5000),
    "top_p": SamplingParams(top_p=0.9),
    "large top_p": SamplingParams(temperature=2, top_p=0.9999999),
    "min_p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=0.8, top_k=900, top_p=0.95, min_p=0.001, logprobs=5),
    "logprobs": SamplingParams(temperature=0, logprobs=3),
    "own logprob": SamplingParams(logprobs=0),
    "best_of": SamplingParams(n=1, best_of=3),
}


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("vocab", [1000, 50257, 128256])
@pytest.mark.parametrize("asked", [*([name] for name in SETTINGS), [*SETTINGS]], ids=str)
def test_no_draw_synchronises(asked: list[str], vocab: int) -> None:
    """Alone, and all in one batch; also where tokens are forbidden."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3 * len(asked), vocab, generator=generator) * 3
    rows = [
        Row(SETTINGS[name], stream_key(number), number, [], [], forbidden)
        for number, name in enumerate(asked)
        for forbidden in ((), (), (0, 7, vocab - 1))
    ]
    there = logits.cuda()
    sampler = Sampler()
    with no_waiting():
        draws = [sampler.draw(there, rows) for _ in range(2)]  # with new columns, and with these
    wanted = [sample.token for sample in Sampler().sample(logits, rows)]
    for draw in draws:
        assert [sample.token for sample in draw.samples()] == wanted


def test_waiting_is_seen() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        x.sum().item()
