"""Cases for drawing, and the tokens as they are defined: every score, and the first maximum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.reference.gumbel import gumbel, hashed, token_hashes
from pagedsim.kernels.reference.nucleus import weights
from pagedsim.kernels.sampling_params import SamplingTensors
from tests.kernels.nuclei import smallest


@dataclass(frozen=True)
class Settings:
    """Of one row; `min_p` is a probability."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


PLAIN = Settings()
GREEDY = Settings(temperature=0.0)
HOT, COLD = Settings(temperature=1e6), Settings(temperature=1e-5)
EVERY = Settings(0.8, 40, 0.9, 0.01)
MIXED = [
    PLAIN,
    GREEDY,
    Settings(0.6, top_k=5),
    Settings(1.7, top_p=0.9),
    Settings(min_p=0.05),
    EVERY,
]


def asked_of(rows: Sequence[Settings], device: str = "cpu") -> SamplingTensors:
    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingTensors(
        column([row.temperature for row in rows], torch.float32),
        column([row.top_k for row in rows], torch.int32),
        column([row.top_p for row in rows], torch.float64),
        column([math.log(row.min_p) if row.min_p else -math.inf for row in rows], torch.float32),
        some_top_k=any(row.top_k for row in rows),
        some_top_p=any(row.top_p < 1 for row in rows),
        some_min_p=any(row.min_p for row in rows),
    )


def words_for(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (rows, 2), generator=generator).int()


def check(logits: Tensor, settings: Sequence[Settings], seed: int = 0) -> None:
    """The tokens of some rows are those that the definition gives; the logits stay."""
    device = str(logits.device)
    before, words = logits.clone(), words_for(len(logits), seed)
    picked = kernels.pick(logits, asked_of(settings, device), words.to(device))
    wanted = [
        defined(row, one, mine)
        for row, one, mine in zip(logits.cpu(), settings, words, strict=True)
    ]
    assert picked.tolist() == wanted
    assert picked.dtype == torch.int64
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


def defined(logits: Tensor, settings: Settings, words: Tensor) -> int:
    """One row's token."""
    if settings.temperature == 0:
        return int(logits.argmax())
    x = logits / torch.tensor(settings.temperature)
    if settings.top_k:
        x[x < x.sort(descending=True).values[settings.top_k - 1]] = -torch.inf
    if settings.top_p < 1:
        inside = torch.tensor(smallest(weights(x[None])[0].tolist(), settings.top_p))
        x = torch.full_like(x, -torch.inf).index_copy(0, inside, x[inside])
    if settings.min_p:
        x[x < x.max() + torch.tensor(math.log(settings.min_p))] = -torch.inf
    bits = hashed(token_hashes(len(x), x.device), words[0], words[1])
    return int((x + gumbel(bits)).argmax())


def hard(vocab: int) -> list[tuple[Tensor, Settings]]:
    """Rows on which a maximum is hard to find, each with its settings."""
    flat = torch.zeros(vocab)
    model = flat.clone().random_(generator=torch.Generator().manual_seed(vocab)) % 23 / 4
    holes = model.masked_fill(torch.arange(vocab) % 3 > 0, -torch.inf)
    alone = torch.full((vocab,), -torch.inf)
    alone[-1] = -3e38
    return [
        (flat, PLAIN),  # the noise decides
        (flat, COLD),
        (flat + 1e4, COLD),  # every score is the same number
        (-flat, GREEDY),
        (torch.where(model > 3, -0.0, 0.0) * 1, GREEDY),  # two zeros, equally large
        (model, HOT),
        (model, COLD),  # ties of the largest
        (model * 1e30, PLAIN),  # the noise is lost
        (model * 1e38, COLD),  # infinite
        (-model * 1e38, COLD),
        (holes, PLAIN),
        (holes, EVERY),
        (holes.neg(), PLAIN),  # +inf
        (alone, HOT),
        (alone, PLAIN),
        (torch.full((vocab,), -torch.inf), PLAIN),
        (torch.full((vocab,), -torch.inf), GREEDY),
        (model.masked_fill(model > 5, torch.nan), PLAIN),
        (model.masked_fill(model > 5, torch.nan), GREEDY),
    ]


@st.composite
def draws(draw: st.DrawFn) -> tuple[Tensor, list[Settings], int]:
    """A few rows of anything that logits may be, settings and a seed of the words."""
    vocab = draw(st.integers(1, 60))
    few = draw(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=4))
    token = st.one_of(st.sampled_from([*few, 0.0, -0.0, -math.inf]), st.floats(-50, 50, width=32))
    row = st.lists(token, min_size=vocab, max_size=vocab).filter(lambda x: max(x) > -math.inf)
    settings = st.builds(
        Settings,
        temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.9, 1e6]),
        top_k=st.sampled_from([0, 0, 1, min(7, vocab)]),
        top_p=st.sampled_from([1.0, 1.0, 0.5, 0.97]),
        min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    )
    logits = torch.tensor(draw(st.lists(row, min_size=3, max_size=3)))
    asked = draw(st.lists(settings, min_size=3, max_size=3))
    asked = [GREEDY if one.temperature == 0 else one for one in asked]
    return logits, asked, draw(st.integers(0, 1 << 30))
